#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which token ids does llama.cpp's own tokenizer give each text of tokenizer.jsonl?

Every line of the file is {"text": str, "parse_special": bool, "ids": [int]}. The texts are the input and stay as they
are; the ids are the answer and are written anew (a line added by hand needs no "ids"). With --check nothing is
written, and the exit status is 1 when an answer differs.

Needs a built libllama (shared) and its source tree for the headers, and a C compiler.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

HERE = Path(__file__).resolve().parent

# A reader cannot see these categories on screen, so they are written as \u escapes: controls, formats, private use,
# surrogates, unassigned and every space but U+0020. So are variation selectors, and the combining marks that make a
# decomposed letter look like a composed one.
UNSEEN_CATEGORIES = {"Cc", "Cf", "Co", "Cs", "Cn", "Zs", "Zl", "Zp"}
UNSEEN_MARKS = [(0x0300, 0x036F), (0x20D0, 0x20FF), (0xFE00, 0xFE0F)]


def compile_shim(include_dirs, lib_dir, folder):
    """Builds tokenizer_shim.c against the given headers and library; answers the loaded library."""
    out = Path(folder) / "oracle_shim.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", str(out), str(HERE / "tokenizer_shim.c")]
    command += [f"-I{d}" for d in include_dirs]
    command += [f"-L{lib_dir}", "-lllama", f"-Wl,-rpath,{lib_dir.resolve()}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True)
    shim = ctypes.CDLL(str(out))
    shim.oracle_open.argtypes = [ctypes.c_char_p]
    shim.oracle_open.restype = ctypes.c_void_p
    shim.oracle_ids.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32,
    ]
    shim.oracle_ids.restype = ctypes.c_int32
    return shim


def ids_of(shim, model, text, parse_special):
    """The ids of one text; a byte-level tokenizer never needs more ids than bytes."""
    raw = text.encode("utf-8")
    room = len(raw) + 1
    ids = (ctypes.c_int32 * room)()
    count = shim.oracle_ids(model, raw, len(raw), parse_special, ids, room)
    if count < 0:
        raise RuntimeError(f"llama_tokenize asked for {-count} ids for {len(raw)} bytes")
    return list(ids[:count])


def can_be_seen(char):
    if char == " ":
        return True
    in_marks = any(first <= ord(char) <= last for first, last in UNSEEN_MARKS)
    return not in_marks and unicodedata.category(char) not in UNSEEN_CATEGORIES


def written(text):
    """A JSON string in which what can be seen stays readable and what cannot is escaped."""
    return '"' + "".join(json.dumps(c, ensure_ascii=not can_be_seen(c))[1:-1] for c in text) + '"'


def line_of(text, parse_special, ids):
    return f'{{"text": {written(text)}, "parse_special": {json.dumps(parse_special)}, "ids": {json.dumps(ids)}}}\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF whose tokenizer is asked")
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp source tree (for its headers)")
    parser.add_argument("--llama-lib", type=Path, required=True, help="folder that holds libllama.so")
    parser.add_argument("--file", type=Path, default=HERE / "tokenizer.jsonl", help="the cases (default: beside this)")
    parser.add_argument("--check", action="store_true", help="compare with the ids in the file and write nothing")
    args = parser.parse_args()

    includes = [args.llama_source / "include", args.llama_source / "ggml" / "include"]
    cases = [json.loads(line) for line in args.file.read_text(encoding="utf-8").split("\n") if line]
    with tempfile.TemporaryDirectory() as folder:
        shim = compile_shim(includes, args.llama_lib, folder)
        model = shim.oracle_open(os.fsencode(args.model))
        if not model:
            sys.exit(f"cannot read the vocabulary of {args.model}")
        lines, wrong = [], 0
        for number, case in enumerate(cases, 1):
            ids = ids_of(shim, model, case["text"], case["parse_special"])
            if args.check and ids != case.get("ids"):
                wrong += 1
                print(f"line {number}: {case['text']!r}: file {case.get('ids')}, llama.cpp {ids}")
            lines.append(line_of(case["text"], case["parse_special"], ids))
    if args.check:
        print(f"{len(cases)} cases, {wrong} differ")
        sys.exit(1 if wrong else 0)
    args.file.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{len(cases)} cases written")


if __name__ == "__main__":
    main()
