"""The bill of materials of the wheel: CycloneDX that names everything that the wheel contains and needs."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "kvtier-0.dist-info"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvtier_sbom", ROOT / "tools" / "sbom.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


SBOM = tool()


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    found: dict[str, Any] = json.loads(SBOM.documents()[0])
    return found


def test_it_has_what_the_schema_requires(document: dict[str, Any]) -> None:
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert isinstance(document["version"], int) and document["version"] >= 1
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    assert re.fullmatch(rf"urn:uuid:{uuid}", document["serialNumber"])
    assert document["metadata"]["lifecycles"] == [{"phase": "build"}]
    assert "timestamp" not in document["metadata"]
    parts = [document["metadata"]["component"], *document["components"]]
    refs = [part["bom-ref"] for part in parts]
    assert len(set(refs)) == len(refs)
    for part in parts:
        assert part["type"] == "library" and part["name"] and part["version"]
        assert re.fullmatch(r"pkg:(pypi|github|generic)/\S+", part["purl"])
        ((licence),) = part["licenses"]
        assert licence.keys() == {"expression"} and licence["expression"]
    for one in document["dependencies"]:
        assert one["ref"] in refs and set(one["dependsOn"]) <= set(refs)
    assert [one["ref"] for one in document["dependencies"]] == refs


def test_it_names_everything_that_an_import_of_the_daemon_needs(document: dict[str, Any]) -> None:
    named = {part["name"]: part["version"] for part in document["components"]}
    for text in SBOM.project()["dependencies"]:
        name = re.split(r"[<>=;\[]", text)[0]
        assert named[name] == metadata.version(name)
    assert {"nanobind", "robin-map", "pygments"} <= named.keys(), "transitive and compiled-in parts"
    assert not {"numpy", "pytest", "kvtier"} & named.keys()
    needs = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    reached, waiting = set(), [document["metadata"]["component"]["bom-ref"]]
    while waiting:
        if (ref := waiting.pop()) not in reached:
            reached.add(ref)
            waiting += needs[ref]
    assert reached == needs.keys(), "each part is needed by another one"


def test_the_licences_of_compiled_code_are_given_in_full() -> None:
    document, text = SBOM.documents("10")
    parts = json.loads(document)["components"]
    for part in parts:
        assert f"{part['name']} {part['version']}: {part['licenses'][0]['expression']}" in text
    assert "Redistribution and use in source and binary forms" in text  # nanobind
    assert "Copyright (c) 2017 Thibaut Goetghebuer-Planchon" in text  # robin-map
    assert [part["version"] for part in parts if part["name"] == "libstdc++"] == ["10"]


def test_it_is_reproducible_and_has_a_time_only_if_one_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first = SBOM.documents()
    assert SBOM.documents() == first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    dated = json.loads(SBOM.documents()[0])
    assert dated["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert dated["serialNumber"] != json.loads(first[0])["serialNumber"]


def test_a_package_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        SBOM.needed(["kvtier-has-no-such-dependency>=1"])
    assert SBOM.needed(["kvtier-has-no-such-dependency>=1; python_version < '3'"]) == {}


def wheel(path: Path) -> Path:
    members = {
        "kvtier/__init__.py": b"",
        f"{FOLDER}/METADATA": b"Metadata-Version: 2.4\nName: kvtier\nLicense-File: LICENSE\n\nText\n\nmore\n",
        f"{FOLDER}/WHEEL": b"Wheel-Version: 1.0\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        rows = "".join(f"{name},sha256=x,{len(data)}\n" for name, data in members.items())
        archive.writestr(zipfile.ZipInfo(f"{FOLDER}/RECORD"), f"{rows}{FOLDER}/RECORD,,\n")
    return path


def test_a_wheel_gets_both_documents_and_a_record_that_is_right(tmp_path: Path) -> None:
    path = wheel(tmp_path / "kvtier-0-py3-none-any.whl")
    for text in ("{}", '{"again": 1}', '{"again": 1}'):
        before = path.read_bytes()
        SBOM.put_into(path, text, "licences\n")
    assert path.read_bytes() == before, "the same documents give the same bytes"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(set(names)) == len(names)
        rows = {
            row[0]: row[1:]
            for row in csv.reader(io.StringIO(archive.read(f"{FOLDER}/RECORD").decode()))
        }
        assert rows.pop(f"{FOLDER}/RECORD") == ["", ""]
        assert rows.keys() | {f"{FOLDER}/RECORD"} == set(names)
        for name, (digest, size) in rows.items():
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data)), name
        assert archive.read(f"{FOLDER}/sboms/kvtier.cdx.json") == b'{"again": 1}'
        assert archive.read(f"{FOLDER}/licenses/THIRD_PARTY.txt") == b"licences\n"
        head, _, body = archive.read(f"{FOLDER}/METADATA").partition(b"\n\n")
        assert head.endswith(b"License-File: LICENSE\nLicense-File: THIRD_PARTY.txt")
        assert body == b"Text\n\nmore\n"
