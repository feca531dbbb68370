"""Every equation, section, appendix, table and figure of the paper that code and pages cite has this number there."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPER = {                               # what the paper has there: a regular expression that the text around matches
    'Eq. 3': 'squared', 'Eq. 4': 'embed|coordinate|patch', 'Eq. 5': 'aggregat|frame|W_t|cos', 'Eq. 6': 'integral',
    'Eq. 7': 'every Fourier mode', 'Eq. 8': r'mix|Fourier|inner_skip|layer\(x\)', 'Eq. 10': 'polytope|doubly',
    'Eq. 9': r'd_l|F\(| round |streams written|AOTBlock|the streams through|Td_ptr|\bTd\b|post1|class Sublayer',
    'Eq. 11': r'_tilde|φ\^a|b_T|mappings|means of|logits|class Maps',
    'Eq. 12': r'_l = |sinkhorn|mappings|means of|layer\(x\)|sigmoid\(|class Maps',
    'Eq. 13': 'gate|softmax|class Streams', 'Eq. 14': 'squared',
    'Sec. 2.2': 'noise', 'Sec. 3': 'W_in|channel maps', 'Sec. 4': 'equations are|token width', 'Sec. 5.1': 'AdamW',
    'Sec. 5.2': 'average', 'Sec. 5.4': 'rollouts',
    'Sec. 5.7': 'probe|interpretability',
    'App. B.1': r'channels|noise|p\(sample',
    'App. B.2': 'Sandwich-Norm|inner_skip|block', 'App. B.3': 'network|training|parameters|Adam',
    'App. C.2': 'channel maps', 'App. C.4': 'scal', 'App. C.6': 'streams|sinkhorn|alpha',
    'App. C.7': 'Poseidon', 'App. C.8': 'step 500',
    'App. C.10': 'heterogen',
    'App. C.11': 'probe|unseen', 'App. C.12': 'latency|timing', 'App. C.13': 'moe', 'App. C.14': 'gain|stability|AdamW',
    'App. C.15': 'truth', 'Table 1': 'main|alone|fine-tuned|persistence', 'Table 2': 'downstream', 'Table 3': 'rollout',
    'Table 4': 'few_shot', 'Table 5': 'ablation', 'Table 31': 'latency',
    'Fig. 4': 't-SNE|crosses', 'Fig. 11': 'score', 'Fig. 18': 'gains',
}
NUMBER = r'\(?[A-C0-9.]*[0-9]\)?'
CITATION = re.compile(rf'\b(Eq|Sec|App|Table|Fig)(?:s?\.|s?(?=\s[0-9]))\s*((?:{NUMBER}(?:,\s|\sand\s|\sto\s)?)*)')
SCRIPTS = 'sinkhorn', 'configs', 'aotpot', 'data', 'train', 'finetune', 'evaluate'
FILES = [ROOT / 'README.md', *(ROOT / f'{name}.py' for name in SCRIPTS),
         *(path for room in ('nets', 'runtime', 'sources', 'lab') for path in sorted((ROOT / room).rglob('*.py'))),
         *sorted((ROOT / 'docs').glob('*.md')), ROOT / 'lab/paper.md']      # no virtual environment, no file of a user


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_citation_names_what_the_paper_has_there(path):
    text = re.sub(r'[-\s]{2,}', ' ', path.read_text())
    for match in CITATION.finditer(text):
        around = text[max(match.start() - 150, 0):match.end() + 150]
        kind = match[1] + ('' if match[1] == 'Table' else '.')
        numbers = re.findall(NUMBER, match[2])
        assert numbers, f'{match[0]!r} names no number: {around}'
        if 'et al.' in text[max(match.start() - 25, 0):match.start()]:      # another paper
            continue
        for number in numbers:
            assert (kind == 'Eq.') == (number[0] == '('), f'{match[0]!r}: only equations stand in parentheses'
            words = PAPER.get(f'{kind} {number.strip("()")}')
            assert words, f'{match[0]!r} is not in the table above; look it up in the paper'
            assert re.search(words, around, re.IGNORECASE), f'{match[0]!r} stands beside nothing of {words!r}: {around}'
