import runtime.spinning  # noqa: F401, before torch is imported
