"""Key files."""

import hashlib

from server import toml_value


def key_file(*tenants):
    """`(name, key, settings)` each; the file holds digests, as `printf %s KEY | sha256sum` prints them."""
    lines = []
    for name, key, settings in tenants:
        digest = hashlib.sha256(key.encode()).hexdigest()
        lines += ["[[tenant]]", f'name = "{name}"', f'keys_sha256 = ["{digest}"]']
        lines += [f"{setting} = {toml_value(value)}" for setting, value in settings.items()]
    return "\n".join(lines) + "\n"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}
