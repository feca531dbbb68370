#!/bin/bash
# AOT-POT and DPOT's block at the paper's tiny, for docs/findings.md: half an hour for the data, then two processes of
# one core for an hour and a half. On a card leave out the limit on threads, and raise the steps to those of some hours.
set -e
export OMP_NUM_THREADS=1

make='python -m sources.generate --preset mini --resolution 128 --data data/contrast --train 96'
$make ns2d_fno_1e-3 ns2d_fno_1e-4 ns2d_fno_1e-5 ns2d_pda ns2d_cond_pda cfdbench
$make swe_pdb dr_pdb ns2d_pdb_M1{,e-1}_eta1e-{1_zeta1e-1,2_zeta1e-2} --frames 21
contrast() {
  python -m lab.reproduce contrasts --size tiny --rows "DPOT's block" AOT-POT --seeds 1 --steps 4400 \
    --data data/contrast --recipe '--dtype bf16 --batch_size 16 --save_every 550' "$@"
}
contrast --list | xargs -P 2 -I{} sh -c '{}'
contrast
