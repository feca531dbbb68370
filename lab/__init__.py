import runtime  # noqa: F401, before torch
