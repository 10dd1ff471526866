"""Writes what a package of Rust crates was linked from: an SBOM (CycloneDX 1.5) and the licence texts of the crates.

usage: third_party.py PACKAGE SBOM LICENCES [cargo's flags for features and target]

Called by packaging/build.sh. `cargo tree` names the crates in the binary: build scripts, macros and tests are not.
Licences of crates that have no file of their own are named by their expression.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

root = pathlib.Path(__file__).resolve().parent.parent
package, sbom, licences, *flags = sys.argv[1:]


def cargo(*args):
    command = [os.environ.get("CARGO", "cargo"), *args]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


# "name vX.Y.Z", "name vX.Y.Z (/path)", "name vX.Y.Z (*)"
tree = cargo("tree", "--locked", "--prefix", "none", "-e", "normal,no-proc-macro", "-p", package, *flags)
linked = sorted({(words[0], words[1].removeprefix("v")) for words in map(str.split, tree.splitlines()) if words})
host = re.search("host: (.*)", cargo("version", "--verbose")).group(1)
metadata = json.loads(cargo("metadata", "--locked", "--format-version=1", f"--filter-platform={host}"))
known = {(crate["name"], crate["version"]): crate for crate in metadata["packages"]}
lock = tomllib.loads((root / "Cargo.lock").read_text())
locked = {(crate["name"], crate["version"]): crate for crate in lock["package"]}


def component(name, version):
    found = {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:cargo/{name}@{version}",
    }
    expression = known[name, version]["license"]
    if expression:
        found["licenses"] = [{"expression": expression.replace("/", " OR ")}]
    checksum = locked[name, version].get("checksum")
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return found


subject = next(crate for crate in linked if crate[0] == package)
document = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.5",
    "version": 1,
    "metadata": {"component": component(*subject)},
    "components": [component(*crate) for crate in linked if crate != subject],
}
pathlib.Path(sbom).write_text(json.dumps(document, indent=1) + "\n")

# The same text is printed once, for all crates that have it.
texts = {}
for crate in linked:
    if known[crate]["source"] is None:
        continue  # of this project, whose licences the package has
    directory = pathlib.Path(known[crate]["manifest_path"]).parent
    names = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name.upper().startswith(names))
    own = [file.read_text(errors="replace").strip() for file in files]
    for text in own or [f"Licensed as {known[crate]['license']}; the crate has no text of it."]:
        texts.setdefault(hashlib.sha256(text.encode()).digest(), (text, []))[1].append(f"{crate[0]} {crate[1]}")
with open(licences, "w") as out:
    for text, crates in texts.values():
        out.write(f"{'=' * 100}\n{', '.join(crates)}\n{'=' * 100}\n\n{text}\n\n")
