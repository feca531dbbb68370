"""Six equations and what one network predicts of them, as an animation.

    python -m lab.equations         docs/figures/equations.gif, of weights/mini.pt

Shapes: T input frames, F frames, H W grid points, C channels.
"""
from pathlib import Path

import torch

import configs
import evaluate
from lab import figures
from runtime import terminal
from sources import generate

STEPS = 15
EQUATIONS = {                                   # (dataset, channel, trajectory): the name above it
    ('ns2d_fno_1e-4', 'w', 0): 'Navier–Stokes',
    ('ns2d_pdb_M1_eta1e-2_zeta1e-2', 'density', 0): 'compressible gas',
    ('swe_pdb', 'h', 0): 'shallow water',
    ('dr_pdb', 'u', 0): 'reaction–diffusion',
    ('ns2d_cond_pda', 'u', 0): 'smoke',
    ('cfdbench', 'u', 2): 'flow past a cylinder',
}


def main():
    terminal.Parser(description=__doc__).parse_args()
    model = evaluate.load('weights/mini.pt')
    T = model.config.frames
    forecasts = []                                          # truth and prediction (F, 2, H, W)
    for dataset, channel, trajectory in EQUATIONS:
        plan = generate.plan(dataset, 'mini', frames=T + STEPS, seed=123)
        frames = torch.from_numpy(generate.simulate(plan, 'test', [trajectory]))
        c = configs.DATASETS[dataset].channels.index(channel)
        prediction = evaluate.rollout(model, frames[:, :T], STEPS, dataset)
        fields = torch.stack([frames[0, T:, ..., c], prediction[0, ..., c]], 1)
        forecasts.append(fields.mT if dataset == 'cfdbench' else fields)        # stored as y, x

    def plot(step):
        figure, axes = figures.pyplot().subplots(2, 6, figsize=(9.3, 3.7))
        for name, fields, (above, below) in zip(EQUATIONS.values(), forecasts, axes.T):
            scale = figures.scale_of_colours(fields[:, 0])
            v, u = fields[step - 1]
            figures.draw_field(above, v, *scale, colours=36)
            figures.draw_field(below, u, *scale, colours=36)
            above.set_title(name)
            below.set_xlabel(f'error {(u - v).norm() / v.norm():.3f}')
        axes[0, 0].set_ylabel('truth')
        axes[1, 0].set_ylabel('prediction')
        figure.suptitle(f'step {step} of {STEPS}: the network saw {T} true frames before step 1, '
                        'and none since')
        return figure
    figures.animate(Path('docs/figures/equations.gif'), plot, STEPS, duration=300)


if __name__ == '__main__':
    terminal.cli(main)
