#!/usr/bin/env bash
# The length scale of py-pde's random fields is 2 pi times as long as their correlation.
#
# ScalarField.random_normal with the correlation 'gaussian' has the spectrum exp(-k^2 L^2 / 2), says its documentation,
# and length_scale sets L. With wave numbers k that is a correlation of exp(-x^2 / 2 L^2) in space.
# A good guess: points at the distance L have the correlation exp(-1/2) = 0.6, and points at L / 2 have 0.9.
# py-pde 0.59.0: at L / 2 there is none, and 0.6 is reached at L / 2 pi already. The k of its formula counts waves in a
# unit length, without 2 pi. An initial state that was meant to be smooth over L has several bumps there. For 'cosine'
# the same k makes L the wave length.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'py-pde==0.59.0' 'numpy==2.4.6' 'scipy==1.17.1' 'numba==0.68.1'
cat > seen.py <<'END'
import numpy as np
import pde

L, points = 8, 2048
grid = pde.CartesianGrid([[0, 256]], points, periodic=True)
random = np.random.default_rng(0)


def spectrum(kind):
    states = [pde.ScalarField.random_normal(grid, correlation=kind, length_scale=L, rng=random) for _ in range(400)]
    return (np.abs(np.fft.rfft([state.data for state in states])) ** 2).mean(0)


correlation = np.fft.irfft(spectrum('gaussian'))
for words, distance in {'L / 2 pi': L / (2 * np.pi), 'L / 2': L / 2, 'L': L}.items():
    there = correlation[round(distance * points / 256)] / correlation[0]
    guess = np.exp(-distance ** 2 / (2 * L ** 2))
    print(f'gaussian, distance {words}: correlation {abs(there):.1f}, guess {guess:.1f}')
print(f'cosine: wave length {256 / spectrum("cosine").argmax() / L:.1f} L')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
gaussian, distance L / 2 pi: correlation 0.6, guess 1.0
gaussian, distance L / 2: correlation 0.0, guess 0.9
gaussian, distance L: correlation 0.0, guess 0.6
cosine: wave length 1.0 L
END
