#!/bin/bash
# How weights/mini.pt was made, in eight cycles of the learning rate by Muon, on one and two cores of an Intel Xeon in bf16.
# The version of that day told the network the raw units, and --noise was relative to the norm over all points and frames.
# The cycles took 93 minutes of one core, and 93, 41, 15, 122, 107, 10 and 10 of both, with one seed. They were chosen on
# validation data. Before the data below: the paper's data in small form, longer trajectories, and more of the short ones.
set -e

python -m sources.generate builtin --preset mini                                                        # data/mini, with seed 0
long='python -m sources.generate --preset mini --test 8 --seed 1 --data data/long'
$long ns2d_fno_1e-3 --train 400 --frames 200; $long ns2d_fno_1e-5 --train 48 --frames 40
$long swe_pdb dr_pdb --train 64 --frames 80; $long ns2d_pda ns2d_cond_pda --train 64 --frames 60
$long ns2d_fno_1e-4 cfdbench ns2d_pdb_M1{,e-1}_eta{1e-1_zeta1e-1,1e-2_zeta1e-2} --train 48 --frames 60
python -m sources.generate --preset mini --test 8 --seed 2 --data data/more ns2d_fno_1e-3 --train 600 --frames 200
short='python -m sources.generate --preset mini --test 2 --valid 2 --seed 3 --data data/short'
$short ns2d_pdb_M1{,e-1}_eta{1e-1_zeta1e-1,1e-2_zeta1e-2} --train 400
$short ns2d_pda --train 200; $short cfdbench --train 120; $short ns2d_fno_1e-4 ns2d_fno_1e-5 ns2d_cond_pda --train 100
mkdir data/mix && for n in $(ls data/mini); do ln -s ../mini/$n data/mix/$n; ln -s ../long/$n data/mix/${n}_long; done
for n in $(ls data/short); do ln -s ../short/$n data/mix/${n}_short; done; ln -s ../more/ns2d_fno_1e-3 data/mix/ns2d_fno_1e-3_more
gases() { for n in M1{,e-1}_eta{1e-1_zeta1e-1,1e-2_zeta1e-2}; do echo ns2d_pdb_${n}_$1; done; }
train='train.py --size mini --normalize --loss change --dtype bf16 --threads 1 --data data/mix --lr 4e-3'
python $train --steps 26000 --sampling swe_pdb=1 ns2d_fno_1e-3_more=2 $(gases short=2) --out out/first
extra='python -m sources.generate --preset mini --test 2 --valid 2 --seed 4 --data data/extra'
$extra ns2d_pda --train 4000; $extra ns2d_cond_pda --train 3000; $extra dr_pdb --train 2000; $extra swe_pdb --train 1000
$extra ns2d_fno_1e-5 ns2d_pdb_M1{,e-1}_eta{1e-1_zeta1e-1,1e-2_zeta1e-2} --train 800; $extra cfdbench ns2d_fno_1e-4 --train 600
for n in $(ls data/extra); do ln -s ../extra/$n data/mix/${n}_extra; done
weights="ns2d_fno_1e-3_long=3 ns2d_fno_1e-3_more=5 swe_pdb=1 dr_pdb=1 $(gases long=0.5) $(gases extra=2) ns2d_pda_extra=4 ns2d_cond_pda_extra=3 \
  cfdbench_extra=2 ns2d_fno_1e-5_extra=3 ns2d_fno_1e-4_extra=2 dr_pdb_extra=3 swe_pdb_extra=2"
both="torchrun --nproc_per_node=2 $train --batch_size 16"
$both --steps 22000 --init_from out/first/last.pt --out out/second --sampling $weights
$both --lr 3e-3 --steps 8000 --init_from out/second/last.pt --out out/third --sampling $weights
python -m sources.generate ns2d_fno_1e-3 --preset mini --train 128 --valid 1 --test 1 --frames 505 --seed 5 --data data/late
ln -s ../late/ns2d_fno_1e-3 data/mix/ns2d_fno_1e-3_late; weights="$weights ns2d_fno_1e-3_late=8"
$both --lr 2e-3 --steps 3500 --init_from out/third/last.pt --out out/fourth --sampling $weights
python -c "import torch; third, fourth = (torch.load(f'out/{x}/last.pt') for x in ('third', 'fourth')); fourth['model'] = {name:
  torch.lerp(value, fourth['model'][name], 0.75) for name, value in third['model'].items()}; torch.save(fourth, 'out/mean.pt')"
$both --steps 30000 --init_from out/mean.pt --out out/fifth --sampling $weights
$both --steps 27000 --init_from out/fifth/last.pt --out out/sixth --sampling $weights ns2d_fno_1e-3_late=12
$both --lr 5e-4 --noise 3e-5 --steps 2600 --init_from out/sixth/last.pt --out out/seventh --sampling $weights ns2d_fno_1e-3_late=12
$both --lr 5e-4 --noise 1e-5 --steps 2400 --init_from out/seventh/last.pt --out out/mini --sampling $weights ns2d_fno_1e-3_more=10 ns2d_fno_1e-3_late=16

# matrices in 16 bits, which changes the errors little, and data/mini as the data of the checkpoint
python - <<'END'
import configs, torch

saved = torch.load('out/mini/last.pt')
weights = {name: value.half() if value.ndim > 1 else value for name, value in saved['model'].items()}
saved['config']['run'] |= {'data': 'data/mini', 'datasets': tuple(sorted(configs.PRETRAINING))}
headers = {name: saved['data'][name] for name in configs.PRETRAINING}
torch.save({'model': weights, 'step': saved['step'], 'config': saved['config'], 'data': headers}, 'weights/mini.pt')
END
