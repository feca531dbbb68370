#!/bin/bash
# How weights/tiny.pt was made, on one H200 on 2026-11-23: two cycles of the learning rate, nine minutes in all.
# The version of that day told the network the raw units, and --noise was relative to the norm over all points and frames.
set -e

# data/paper, the paper's twelve: python -m sources.generate $(the names) --train 160 --valid 8 --test 16 --data data/paper
python -m sources.generate ns2d_fno_1e-3 --train 160 --valid 8 --test 8 --frames 200 --resolution 128 --seed 1 --data data/long
mkdir data/mix && for n in $(ls data/paper); do ln -s ../paper/$n data/mix/$n; done && ln -s ../long/ns2d_fno_1e-3 data/mix/ns2d_fno_1e-3_long
train='python train.py --size tiny --normalize --data data/mix --batch_size 32 --lr 1e-3 --warmup 0.1 --noise 1e-4 --grad_clip 1 --compile on'
$train --sampling ns2d_fno_1e-3_long=3 --steps 5500 --out out/first
$train --sampling ns2d_fno_1e-3_long=3 --steps 6500 --init_from out/first/last.pt --out out/tiny
