"""Computes the test vectors of block_keys.rs with nothing but hashlib. Run: python3 block_keys.py"""
import hashlib, struct

def lp(b): return struct.pack('<Q', len(b)) + b

def namespace(weights, config, tokenizer, template, adapter, kv_dtype, layout):
    h = hashlib.sha256(b'penstock-namespace-1\0')
    for field in (weights, config, tokenizer, template, adapter, kv_dtype, layout): h.update(lp(field))
    return h.digest()

def root(ns, trust): return hashlib.sha256(b'penstock-block-root-1\0' + ns + lp(trust)).digest()[:16]

def keys(parent, size, tokens, spans=()):
    out = []
    for first in range(0, len(tokens) - size + 1, size):
        m = parent + b''.join(struct.pack('<I', t) for t in tokens[first:first + size])
        for start, length, content in spans:
            a, b = max(start, first), min(start + length, first + size)
            if a < b: m += struct.pack('<III', a - first, b - a, a - start) + content
        parent = hashlib.sha256(m).digest()[:16]
        out.append(parent.hex())
    return out

d = lambda text: hashlib.sha256(text).digest()
ns = namespace(d(b'w'), d(b'c'), d(b't'), d(b'j'), b'', b'bf16', b'paged-16')
ns2 = namespace(d(b'w'), d(b'c'), d(b't'), b'', d(b'lora'), b'f32', b'paged-16')
print('namespace', ns.hex()); print('namespace2', ns2.hex())
for trust in (b'', b'tenant-a', b'tenant-b'): print('root', trust, root(ns, trust).hex())
r = root(ns, b'tenant-a')
print('keys', keys(r, 4, list(range(10))))
print('wide', keys(r, 16, [0, 1, 49151, 2**32 - 1] * 8))
print('spans', keys(r, 4, [7] * 12, [(2, 5, d(b'image')), (8, 1, d(b'dot'))]))
for kv_dtype in (b'bf16', b'int8'):
    held = namespace(d(b'w'), d(b'c'), d(b't'), d(b'j'), b'', kv_dtype, b'paged-16')
    print('held', kv_dtype, held.hex()[:12], keys(root(held, b'tenant-a'), 4, list(range(10))))
