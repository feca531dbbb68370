#!/bin/bash
# How weights/tiny.pt was made with one seed in eight hours of two cores in bf16: seven families on the paper's grid, of
# which ns2d_fno_1e-3 has long trajectories, too, in pieces of 30 frames. The data take 9 GB and forty minutes.
set -e

more='python -m sources.generate --preset mini --resolution 128'
$more --data data/tiny ns2d_pda ns2d_cond_pda --train 384
$more --data data/tiny dr_pdb swe_pdb --train 384 --frames 21
$more --data data/tiny ns2d_fno_1e-5 --train 128
$more --data data/tiny ns2d_pdb_M1_eta1e-1_zeta1e-1 --train 128 --frames 21
$more --data data/short ns2d_fno_1e-3 --train 384
$more --data data/long ns2d_fno_1e-3 --train 32 --frames 480 --test 1 --valid 0 --seed 1
python -m sources.prepare ns2d_fno_1e-3 --data data/tiny --layout NTXYC --frames 30 --valid 0.01 \
  --source data/{long,short}/ns2d_fno_1e-3/train.h5 --test_source data/short/ns2d_fno_1e-3/test.h5
# goes on after a stop
torchrun --standalone --nproc_per_node=2 train.py --size tiny --data data/tiny --out out/tiny --resume --dtype bf16 \
  --steps 12000 --batch_size 32 --optimizer muon --lr 3e-3 --warmup 0.05 --grad_clip 1.0 --noise 3e-5 --loss change \
  --normalize --sampling ns2d_fno_1e-3=4 ns2d_pda=2 ns2d_cond_pda=2 swe_pdb=1 dr_pdb=1 --save_every 250

# matrices in 16 bits, which changes the errors little, and the headers of what the generator makes
python - <<'END'
import data, torch

saved = torch.load('out/tiny/last.pt')
weights = {name: value.half() if value.ndim > 1 else value for name, value in saved['model'].items()}
headers = saved['data']
header = data.read_headers('data/short/ns2d_fno_1e-3')
header['train'] |= {key: headers['ns2d_fno_1e-3']['train'][key] for key in ('units', 'shape')}
headers['ns2d_fno_1e-3'] = header
torch.save({'model': weights, 'step': saved['step'], 'config': saved['config'], 'data': headers}, 'weights/tiny.pt')
END
