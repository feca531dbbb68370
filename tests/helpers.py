"""What several test files share."""
import torch

import aotpot
import configs

# ------------------------------------------------------------------------------------------------ networks

SMALL = dict(width=16, mlp=24, depth=2, heads=2, patch=4, resolution=16, frames=3, channels=2, out_width=6)


def fresh(form='fast', **overrides):
    """A small network in float64 as it starts."""
    return aotpot.AOTPOT(configs.model('tiny', **{**SMALL, **overrides}), form).double()


def build(form='fast', dtype=torch.float64, **overrides):
    """A small network whose gates, biases and affine parameters are not at their trivial start."""
    model = fresh(form, **overrides).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and 'gamma' not in name or name.endswith('b_T'):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def field(model, B=2, grid=None):
    """A random input of a network, on the grid of its config or on another one."""
    config = model.config
    return torch.randn(B, config.frames, *(grid or config.resolution), config.channels,
                       dtype=next(model.parameters()).dtype)


def mappings_of(model, u):
    """The (a, d, T) of every sub-layer in one forward pass."""
    seen = []
    hooks = [module.register_forward_hook(lambda *args: seen.append(args[2]))
             for module in model.modules() if isinstance(module, aotpot.Mappings)]
    with torch.no_grad():
        model(u)
    for hook in hooks:
        hook.remove()
    return seen
