#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What string does transformers render from each list of messages?

Every line of chat_template.jsonl is {"name", "add_generation_prompt", "messages", "rendered"}. All but "rendered" is
the input and stays as it is; "rendered" is the answer of apply_chat_template and is written anew. With --check nothing
is written, and the exit status is 1 when an answer differs.
"""

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="the folder that dequantise.py wrote")
    default = HERE / "chat_template.jsonl"
    parser.add_argument("--file", type=Path, default=default, help="the cases (default: beside this)")
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.hf)
    cases = [json.loads(line) for line in args.file.read_text(encoding="utf-8").split("\n") if line]
    wrong = 0
    for case in cases:
        rendered = tokenizer.apply_chat_template(
            case["messages"], tokenize=False, add_generation_prompt=case["add_generation_prompt"]
        )
        if args.check and rendered != case.get("rendered"):
            wrong += 1
            print(f"{case['name']}: file {case.get('rendered')!r}, transformers {rendered!r}")
        case["rendered"] = rendered
    if args.check:
        print(f"{len(cases)} cases, {wrong} differ")
        sys.exit(1 if wrong else 0)
    lines = [json.dumps(case) + "\n" for case in cases]
    args.file.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{len(cases)} cases written")


if __name__ == "__main__":
    main()
