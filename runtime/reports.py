"""The JSON file of --json: all numbers of a command on a trained network."""
import json
import os
from pathlib import Path

from configs import InputError
from runtime import distributed, files


def require_report(path):
    """Raise InputError if --json names a file that is there, or that cannot be written."""
    if not path:
        return
    if not path.endswith('.json'):
        raise InputError(f'--json {path}: the name of a report ends in .json')
    if Path(path).exists():
        raise InputError(f'--json {path}: this file is there; choose another name, or delete it')
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f'--json {path}: cannot be written into {folder}')


def finish(args, processes, name, report):
    """Write a report to --json, tensors as means and values, non-finite as null; then leave."""
    if args.json:
        text = json.dumps({'models': {name: report}},
                          default=lambda x: {'mean': x.mean().item(), 'samples': x.flatten().tolist()})
        files.write_text(args.json, json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1))
    distributed.leave(processes)
