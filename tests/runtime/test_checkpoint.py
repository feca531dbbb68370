"""Checkpoints: round trips, other people's files, DPOT's and MoE-POT's weights."""
import argparse
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import configs
import evaluate
from helpers import SMALL, build, dpot_state, field
from nets.fast import Fast
from runtime import checkpoint


def test_a_checkpoint_gives_its_network_back_unless_that_is_none_of_ours(tmp_path):
    model, path = build(dtype=torch.float32, normalize=True), tmp_path / 'last.pt'
    config, state = dataclasses.asdict(model.config), model.state_dict()
    del config['alpha'], config['sinkhorn_iters']
    u = field(model)
    for fields, tensors, words in (({}, {}, ''), ({'later': True}, {}, "damaged, or no checkpoint .*'later'"),
                                   ({}, {'layers.0.later': torch.ones(3)}, 'not the weights .*layers.0.later')):
        checkpoint.save_file({'model': {**state, **tensors}, 'step': 1, 'later': 5, 'config': {
            'model': {**config, **fields}, 'run': {'overwrite': True}, 'later': None}}, path)
        if words:
            with pytest.raises(configs.InputError, match=f'^{path}: {words}'):
                checkpoint.load_model(checkpoint.load_file(path))
        else:
            for form in ('fast', 'paper'):
                loaded = checkpoint.load_model(checkpoint.load_file(path), form)
                assert isinstance(loaded, Fast) == (form == 'fast') and not loaded.training
                torch.testing.assert_close(loaded(u), model(u), rtol=1e-4, atol=1e-5)


def test_a_file_whose_bytes_have_changed_is_refused(pretrained, tmp_path):
    path = tmp_path / 'last.pt'
    good = (pretrained / 'last.pt').read_bytes()
    tensor = torch.load(pretrained / 'last.pt', weights_only=True)['model']['aggregate.weight'].numpy().tobytes()
    start = good.index(tensor)
    path.write_bytes(good[:start + 64] + bytes(64) + good[start + 128:])
    with pytest.raises(configs.InputError, match='last.pt: damaged, or no .* checksum'):
        checkpoint.load_file(path)
    path.write_bytes(good)
    assert checkpoint.load_file(path)['step'] == 8
    torch.save({'a': 1.5, 'b': 10 ** 6}, path, _use_new_zipfile_serialization=False)            # as old files are
    old = path.read_bytes()
    for size in range(len(old)):
        path.write_bytes(old[:size])
        with pytest.raises(configs.InputError, match='last.pt: damaged, or no checkpoint'):
            checkpoint.load_file(path)


def test_a_folder_stands_for_its_last_checkpoint_whose_name_is_that_of_the_run_or_its_own(pretrained):
    assert checkpoint.load_file(pretrained)['path'] == pretrained / 'last.pt'
    names = {'out/a/last.pt': 'a', 'out/a/best.pt': 'a', 'out/a/step12.pt': 'a', 'last.pt': Path.cwd().name,
             'weights/mini.pt': 'mini', 'steps.pt': 'steps'}
    assert {path: checkpoint.name_of(Path(path)) for path in names} == names


def moe_pot_state(E=6, shared=2, h=24, D=16, depth=2):
    """The same for MoE-POT, in training: its statistics are not at their start."""
    state = {name: value for name, value in dpot_state(D=D, depth=depth).items() if '.mlp.' not in name}
    layers = {'feature_extractor.conv.0': (h, D), 'gating.gate.0': (2 * h, h),
              'gating.gate.3.fc.0': (2 * h // 16, 2 * h), 'gating.gate.3.fc.2': (2 * h, 2 * h // 16),
              'gating.gate.4': (h, 2 * h), 'gating.gate.7': (E, h),
              **{f'shared_experts.{e}.conv.0': (D, h) for e in range(shared)},
              **{f'experts.{e}.conv.0': (D, h) for e in reversed(range(E))}}
    for i in range(depth):
        for name, shape in layers.items():
            state[f'blocks.{i}.MoE.{name}.weight'] = torch.randn(*shape, 1, 1) / shape[1] ** 0.5
            state[f'blocks.{i}.MoE.{name}.bias'] = torch.randn(shape[0])
        for name, n in (('gating.gate.1', 2 * h), ('gating.gate.5', h)):
            state[f'blocks.{i}.MoE.{name}.num_batches_tracked'] = torch.tensor(7)
            for kind, value in (('weight', torch.randn(n)), ('bias', torch.randn(n)),
                                ('running_mean', torch.randn(n)), ('running_var', 0.01 * torch.rand(n) + 0.01)):
                state[f'blocks.{i}.MoE.{name}.{kind}'] = value
    return state


def experts(w, x, tau):
    """MoE-POT's mixture of experts on x (B, D, h, w), all of them and one sample after another."""
    linear = lambda name, v: F.conv2d(v, w[f'{name}.weight'], w[f'{name}.bias'])
    norm = lambda name, v: F.batch_norm(v, w[f'{name}.running_mean'], w[f'{name}.running_var'], w[f'{name}.weight'],
                                        w[f'{name}.bias'])
    f = F.gelu(linear('feature_extractor.conv.0', x))
    v = F.gelu(norm('gating.gate.1', linear('gating.gate.0', f.mean((2, 3), keepdim=True))))
    attention = [linear('gating.gate.3.fc.2', F.gelu(linear('gating.gate.3.fc.0', pooled)))
                 for pooled in (v.mean((2, 3), keepdim=True), v.amax((2, 3), keepdim=True))]
    v = v * torch.sigmoid(sum(attention))
    s = linear('gating.gate.7', F.gelu(norm('gating.gate.5', linear('gating.gate.4', v))))[:, :, 0, 0]
    count = lambda of: len({name.split('.')[1] for name in w if name.startswith(of)})
    out = sum(F.gelu(linear(f'shared_experts.{e}.conv.0', f)) for e in range(count('shared_'))) / count('shared_')
    for b, row in enumerate(s):
        largest = row.argsort(descending=True)[:4]
        for e, weight in zip(largest.tolist(), torch.softmax(row[largest] / tau, 0)):
            out[b] += weight * F.gelu(linear(f'experts.{e}.conv.0', f[b:b + 1]))[0]
    return out


def dpot(state, u, K=2, depth=2, tau=None):
    """DPOT or MoE-POT as paper and public weights have it, on u (B, X, Y, T, C), frame after frame, mode after mode."""
    B, X, Y, T, C = u.shape
    if 'scale_feats_mu.weight' in state:
        mean, deviation = (moment(dim=(1, 2, 3), keepdim=True) for moment in (u.mean, u.std))
        u = (u - mean) / (deviation + 1e-6)
    z = 0
    for t in range(T):
        time = t / (T - 1)
        x, y = (torch.linspace(0, 1, n, dtype=u.dtype) for n in (X, Y))
        x, y = x[:, None].expand(B, X, Y), y.expand(B, X, Y)
        image = torch.stack([*u[:, :, :, t].unbind(-1), x, y, torch.full_like(x, time)], 1)
        P = state['patch_embed.proj.0.weight'].shape[-1]
        image = F.conv2d(image, state['patch_embed.proj.0.weight'], state['patch_embed.proj.0.bias'], stride=P)
        token = F.conv2d(F.gelu(image), state['patch_embed.proj.2.weight'], state['patch_embed.proj.2.bias'])
        token = (token + state['pos_embed']).permute(0, 2, 3, 1)
        if 'time_agg_layer.gamma' in state:
            token = token * torch.cos(time * state['time_agg_layer.gamma'][0])
        z = z + token @ state['time_agg_layer.w'][t]
    if 'scale_feats_mu.weight' in state:
        moments = torch.cat([mean, deviation + 1e-6], -1)[:, 0, 0]                      # (B, 1, 2C)
        shift, scale = (F.linear(moments, state[f'scale_feats_{name}.weight'], state[f'scale_feats_{name}.bias'])
                        for name in ('mu', 'sigma'))
        z = z * scale[:, None] + shift[:, None]
    z = z.permute(0, 3, 1, 2)
    for i in range(depth):
        w = {name.removeprefix(f'blocks.{i}.'): value for name, value in state.items() if f'blocks.{i}.' in name}
        x = F.group_norm(z, 8, w['norm1.weight'], w['norm1.bias'])
        full = torch.fft.rfft2(x, norm='ortho').unflatten(1, (K, -1))                   # (B, K, D/K, h, w/2+1)
        for layer in '12':
            weight, bias = torch.complex(*w[f'filter.w{layer}']), torch.complex(*w[f'filter.b{layer}'])
            full = torch.einsum('bkixy,kio->bkoxy', full, weight) + bias[None, :, :, None, None]
            if layer == '1':
                full = torch.complex(F.gelu(full.real), F.gelu(full.imag))
        x = x + torch.fft.irfft2(full.flatten(1, 2), s=x.shape[2:], norm='ortho')
        x = F.group_norm(x, 8, w['norm2.weight'], w['norm2.bias'])
        if 'mlp.0.weight' in w:
            x = F.gelu(F.conv2d(x, w['mlp.0.weight'], w['mlp.0.bias']))
            z = z + F.conv2d(x, w['mlp.2.weight'], w['mlp.2.bias'])
        else:
            z = z + experts({name.removeprefix('MoE.'): value for name, value in w.items()}, x, tau)
    z = F.gelu(F.conv_transpose2d(z, state['out_layer.0.weight'], state['out_layer.0.bias'], stride=P))
    z = F.gelu(F.conv2d(z, state['out_layer.2.weight'], state['out_layer.2.bias']))
    out = F.conv2d(z, state['out_layer.4.weight'], state['out_layer.4.bias']).permute(0, 2, 3, 1)
    return out * (deviation[..., 0, :] + 1e-6) + mean[..., 0, :] if 'scale_feats_mu.weight' in state else out


@pytest.mark.parametrize('kind', ['with arguments', 'parallel', 'weights only', 'linear in time', 'normalized',
                                  'experts', 'experts, parallel', 'experts with a temperature'])
def test_a_checkpoint_of_dpot_or_moe_pot_gives_the_outputs_of_its_network(kind, tmp_path):
    moe, normalize, tau = kind.startswith('experts'), kind == 'normalized', 1.25 if 'temperature' in kind else 0.5
    state = moe_pot_state() if moe else dpot_state(gamma=kind != 'linear in time', normalize=normalize)
    weights, path = dict(state), tmp_path / 'model_Ti.pth'
    if 'temperature' in kind:
        weights.update({f'blocks.{i}.MoE.gating.temperature': torch.tensor(tau) for i in range(2)})
    if 'parallel' in kind:
        weights = {f'module.{name}': value for name, value in weights.items()}
    args = argparse.Namespace(modes=16, act='gelu', train_paths=['swe_pdb'])
    torch.save(weights if kind == 'weights only' else {'args': args, 'model': weights, 'optimizer': {}}, path)
    u = torch.randn(5, 3, 16, 16, 2, dtype=torch.float64) * torch.tensor([1, 0.3]) + torch.tensor([0, 2])
    options = dict(residual='plain', normalize=normalize, **({'experts': 6} if moe else {}))
    options['modes'] = 32 if kind == 'weights only' else 16
    with torch.no_grad():
        theirs = dpot({name: value.double() for name, value in state.items()}, u.permute(0, 2, 3, 1, 4), tau=tau)
        for model in (checkpoint.load_model(checkpoint.load_file(path), form) for form in ('fast', 'paper')):
            assert model.config == configs.model('tiny', **{**SMALL, **options})
            ours, single = (evaluate.rollout(model.to(dtype), u.to(dtype), 1)[:, 0]
                            for dtype in (torch.float64, torch.float32))
            close = 1e-5 if normalize else 1e-10                        # DPOT's 1e-6 is in the units of the field
            assert (ours - theirs).norm() < close * theirs.norm() and (single - theirs).norm() < 1e-5 * theirs.norm()
            small = 1e-3 * u[..., :1]                                   # beside padding
            ours, state_64 = evaluate.rollout(model.double(), small, 1)[:, 0], {k: x.double() for k, x in state.items()}
            padded = F.pad(small, (0, 1), value=1).permute(0, 2, 3, 1, 4)
            assert (ours - dpot(state_64, padded, tau=tau)[..., :1]).norm() < 2e-3 * ours.norm()


def test_weights_that_are_not_finite_are_not_saved_and_the_old_file_stays(tmp_path):
    path = tmp_path / 'last.pt'
    path.write_text('old')
    weights = {'a': torch.ones(2), 'b': torch.tensor([1, torch.inf])}
    with pytest.raises(configs.InputError, match=f'^{path}: the weights b are not finite at step 3, so'):
        checkpoint.save_file({'model': weights, 'step': 3}, path)
    assert path.read_text() == 'old' and len([*tmp_path.iterdir()]) == 1


class Unwanted:
    def __reduce__(self):
        return print, ('this ran',)


def test_checkpoints_that_are_not_dpots_network_are_refused_by_name(tmp_path, capsys):
    state, path = dpot_state(), tmp_path / 'model.pth'
    args = argparse.Namespace(act='tanh')
    for saved, words in (
            ({'model': {**state, 'blocks.0.MoE.experts.0.conv.0.weight': torch.ones(1)}}, 'no checkpoint of'),
            ({'model': moe_pot_state(E=3)}, 'experts 3: a sample takes 4 of them'),
            ({'model': state, 'args': args}, '--act tanh'),
            ({'model': {**state, 'blocks.0.extra': torch.ones(1)}}, 'layers.0.extra'),
            ({'model': state, 'args': Unwanted()}, 'no checkpoint of .*Weights only load failed')):
        torch.save(saved, path)
        with pytest.raises(configs.InputError, match=words) as error:
            checkpoint.load_file(path)
        assert str(path) in str(error.value) and '\n' not in str(error.value)
    assert 'this ran' not in capsys.readouterr().out
