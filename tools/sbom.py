"""Write the software bill of materials (CycloneDX 1.6) and the licences of what a wheel contains and needs.

    python tools/sbom.py --out dist [--wheel dist/kvtier-*.whl] [--libstdcxx VERSION]

Versions and licences come from the metadata of the packages that are installed beside this interpreter; no
network is used. With --wheel, both documents are also put into the wheel (PEP 770, PEP 639), whose RECORD is
updated. The output depends only on these packages and on pyproject.toml: it is sorted, and has a time only if
SOURCE_DATE_EPOCH is set.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import re
import tomllib
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LICENCES = "THIRD_PARTY.txt"
NAMESPACE = uuid.UUID("9b1d6f5e-2d0c-5b3a-9d57-0a5c7d3f5b11")
EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip archive
LICENCE_FILES = re.compile(r"(^|/)(licen[cs]e|notice|copying|authors)[^/]*$", re.IGNORECASE)
# For packages whose metadata have no expression: classifiers, and short texts.
SPDX = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "MIT License": "MIT",
    "ISC License": "ISC",
}
GCC_EXCEPTION = "GPL-3.0-or-later WITH GCC-exception-3.1"


@dataclass(frozen=True, slots=True)
class Part:
    """A component of the bill: a package that the wheel needs, or code that it contains."""

    name: str
    version: str
    licence: str  # an SPDX expression; empty if the metadata have none
    purl: str
    contained: bool = False
    texts: tuple[tuple[str, str], ...] = ()  # names and contents of its licence files
    needs: tuple[str, ...] = field(default=())  # names


def project() -> Mapping[str, Any]:
    found: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def needed(requirements: Sequence[str]) -> dict[str, Part]:
    """Return the installed packages that these requirements name, and those that they need in turn."""
    found: dict[str, Part] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        wanted, extra = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        installed = metadata.distribution(name)
        below = [
            (one, each)
            for each in ("", *sorted(wanted.extras))
            for one in map(Requirement, installed.requires or ())
            if one.marker is None or one.marker.evaluate({"extra": each})
        ]
        if name not in found:
            needs = sorted({canonicalize_name(one.name) for one, _ in below})
            found[name] = _part(name, installed, tuple(needs))
            waiting += below
    return found


def _part(name: str, installed: metadata.Distribution, needs: tuple[str, ...] = ()) -> Part:
    version = installed.version
    texts = tuple(_texts(installed))
    return Part(
        name, version, licence_of(installed.metadata), f"pkg:pypi/{name}@{version}", False, texts, needs
    )  # fmt: skip


def licence_of(fields: Any) -> str:
    """Return the SPDX expression of a package; empty if it names no licence."""
    if expression := fields.get("License-Expression"):
        return str(expression)
    classified = {SPDX[one] for one in fields.get_all("Classifier", ()) if one in SPDX}
    if len(classified) > 1:  # the metadata do not say whether all of them apply, or one of them
        return " OR ".join(sorted(classified))
    text = str(fields.get("License") or "").strip()
    if text and "\n" not in text and len(text) < 60:
        return SPDX.get(text, text)
    return "".join(classified)


def _texts(installed: metadata.Distribution) -> Iterator[tuple[str, str]]:
    for file in sorted(installed.files or (), key=str):
        inside = ".dist-info/" in str(file)
        if inside and LICENCE_FILES.search(str(file)):
            yield file.name, file.read_text(encoding="utf-8")


def contained(libstdcxx: str) -> list[Part]:
    """Return the foreign code that is compiled into the native module."""
    nanobind = metadata.distribution("nanobind")
    header = next(
        file for file in nanobind.files or () if str(file).endswith("tsl/robin_map.h")
    ).read_text(encoding="utf-8")
    comment = header.partition("*/")[0].removeprefix("/**")
    text = "\n".join(line.strip().removeprefix("*").strip() for line in comment.splitlines())
    version = nanobind.version
    base = _part("nanobind", nanobind)
    parts = [
        Part(base.name, version, base.licence, base.purl, True, base.texts, ("robin-map",)),
        Part(
            "robin-map", f"nanobind-{version}", "MIT", "pkg:github/Tessil/robin-map", True,
            (("robin_map.h", text.strip() + "\n"),),
        ),
    ]  # fmt: skip
    if libstdcxx:
        purl = f"pkg:generic/libstdc%2B%2B@{libstdcxx}"
        parts.append(Part("libstdc++", libstdcxx, GCC_EXCEPTION, purl, True))
    return parts


def bill(parts: Sequence[Part], direct: Sequence[str]) -> dict[str, Any]:
    """Return the document. `direct` has the names of the packages that the wheel itself needs."""
    about = project()
    version = about["version"]
    own = f"pkg:pypi/kvtier@{version}"
    refs = {part.name: part.purl for part in parts}
    inner = [part for part in parts if part.contained]
    body: dict[str, Any] = {
        "components": [_component(part) for part in parts],
        "dependencies": [
            {"ref": own, "dependsOn": sorted({refs[name] for name in direct} | {one.purl for one in inner})},
            *(
                {"ref": part.purl, "dependsOn": sorted(refs[name] for name in part.needs)}
                for part in parts
            ),
        ],
    }  # fmt: skip
    about_wheel: dict[str, Any] = {
        "component": {
            "type": "library", "bom-ref": own, "name": about["name"], "version": version,
            "description": about["description"], "licenses": [{"expression": about["license"]}],
            "purl": own,
        },
        "lifecycles": [{"phase": "build"}],
    }  # fmt: skip
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        time = datetime.fromtimestamp(int(epoch), UTC)
        about_wheel["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    text = json.dumps([about_wheel, body], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, text)}",
        "version": 1,
        "metadata": about_wheel,
        **body,
    }


def _component(part: Part) -> dict[str, Any]:
    how = "compiled into the wheel" if part.contained else "installed beside the wheel"
    found: dict[str, Any] = {
        "type": "library", "bom-ref": part.purl, "name": part.name, "version": part.version,
        "scope": "required", "purl": part.purl,
        "properties": [{"name": "kvtier:use", "value": how}],
    }  # fmt: skip
    if part.licence:
        found["licenses"] = [{"expression": part.licence}]
    return found


def licences(parts: Sequence[Part]) -> str:
    """Return the list of licences, and their texts."""
    lines = ["Software of others that kvtier contains or needs, and its licences.", ""]
    for title, inside in (
        ("Compiled into the native module of the wheel:", True),
        ("Installed beside the wheel as dependencies, and not part of it:", False),
    ):
        lines += [title, ""]
        lines += [
            f"    {part.name} {part.version}: {part.licence or 'see its text below'}"
            for part in parts
            if part.contained is inside
        ]
        lines.append("")
    lines += [
        "The sources in kernels/ implement published algorithms, such as BLAKE3 and XXH3, which their",
        "comments name. No file there has a copyright notice of another project.",
        "",
    ]
    for part in parts:
        for name, text in part.texts:
            lines += ["-" * 78, f"{part.name} {part.version}: {name}", "-" * 78, text.strip(), ""]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


def put_into(wheel: Path, document: str, text: str) -> None:
    """Add both documents to a wheel, and update its METADATA and RECORD. Replaces earlier ones."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    (record,) = (
        info.filename for info, _ in members if info.filename.endswith(".dist-info/RECORD")
    )
    folder = record.removesuffix("/RECORD")
    added = {
        f"{folder}/sboms/kvtier.cdx.json": document.encode(),
        f"{folder}/licenses/{LICENCES}": text.encode(),
    }
    kept = [(i, data) for i, data in members if i.filename not in (*added, record)]
    for at, (info, data) in enumerate(kept):
        if info.filename == f"{folder}/METADATA":
            kept[at] = info, _with_licence_file(data)
    changed = {info.filename: data for info, data in kept} | added
    rows = [row for row in csv.reader(io.StringIO(dict(_named(members))[record].decode())) if row]
    listed = [row for row in rows if row[0] not in changed and row[0] != record]
    listed += [[name, _digest(data), str(len(data))] for name, data in changed.items()]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*sorted(listed), [record, "", ""]])
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in kept:
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
        for name, data in (*added.items(), (record, out.getvalue().encode())):
            info = zipfile.ZipInfo(name, EARLIEST)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    new.replace(wheel)


def _named(members: Sequence[tuple[zipfile.ZipInfo, bytes]]) -> Iterator[tuple[str, bytes]]:
    return ((info.filename, data) for info, data in members)


def _with_licence_file(data: bytes) -> bytes:
    line = f"License-File: {LICENCES}\n".encode()
    head, blank, body = data.partition(b"\n\n")
    return data if line in data else head + b"\n" + line.rstrip() + blank + body


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def documents(libstdcxx: str = "") -> tuple[str, str]:
    """Return the bill of materials and the licences."""
    requirements = project()["dependencies"]
    packages = needed(requirements)
    parts = [*contained(libstdcxx), *(packages[name] for name in sorted(packages))]
    direct = [canonicalize_name(Requirement(text).name) for text in requirements]
    document = bill(parts, [name for name in direct if name in packages])
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n", licences(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--libstdcxx", default="", help="the version that is linked statically")
    arguments = parser.parse_args()
    document, text = documents(arguments.libstdcxx)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"kvtier-{project()['version']}.cdx.json").write_text(document)
    (arguments.out / f"kvtier-{project()['version']}.{LICENCES}").write_text(text)
    if arguments.wheel is not None:
        put_into(arguments.wheel, document, text)


if __name__ == "__main__":
    main()
