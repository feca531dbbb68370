#!/bin/bash
# How weights/mini.pt was made with one seed in seven hours and a half of two cores in fp32: the recipe of --size mini,
# and a short second cycle in which half of the draws are of ns2d_fno_1e-3, for its long rollouts. The data, of 40
# minutes, are the twelve families with more trajectories, and long ones of ns2d_fno_1e-3 in pieces of 30 frames.
set -e

more='python -m sources.generate --preset mini --data data/big'
$more ns2d_pda ns2d_cond_pda dr_pdb swe_pdb --train 3000
$more ns2d_fno_1e-4 ns2d_fno_1e-5 cfdbench ns2d_pdb_M1{,e-1}_eta{1e-1_zeta1e-1,1e-2_zeta1e-2} --train 768
python -m sources.generate ns2d_fno_1e-3 --preset mini --data data/short --train 3000
python -m sources.generate ns2d_fno_1e-3 --preset mini --data data/long --train 256 --frames 480 --test 1 --valid 0 \
  --seed 1
python -m sources.prepare ns2d_fno_1e-3 --data data/big --layout NTXYC --frames 30 --valid 0.005 \
  --source data/{long,short}/ns2d_fno_1e-3/train.h5 --test_source data/short/ns2d_fno_1e-3/test.h5
# both trainings go on after a stop
train='torchrun --standalone --nproc_per_node=2 train.py --size mini --data data/big --resume'
$train --out out/first
$train --init_from out/first --steps 3500 --lr 5e-4 --out out/mini \
  --sampling ns2d_fno_1e-3=16 ns2d_pda=2 ns2d_cond_pda=2 swe_pdb=1 dr_pdb=1

# matrices in 16 bits, which changes the errors little, and data/mini as the data of the checkpoint
python -m sources.generate builtin --preset mini
python - <<'END'
import configs, data, torch

saved = torch.load('out/mini/last.pt')
weights = {name: value.half() if value.ndim > 1 else value for name, value in saved['model'].items()}
saved['config']['run'] |= {'data': 'data/mini', 'datasets': tuple(sorted(configs.PRETRAINING))}
headers = {name: data.read_headers(f'data/mini/{name}') for name in saved['data']}
for name, header in headers.items():
    header['train']['units'] = saved['data'][name]['train']['units']
torch.save({'model': weights, 'step': saved['step'], 'config': saved['config'], 'data': headers}, 'weights/mini.pt')
END
