"""KubeVirt's own code as programs: the oracle's module at its version, others made for theirs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ORACLE = Path(__file__).parent / "oracle"
PINNED = "v1.8.4"
"""The version of the oracle's go.mod."""
_LIBRARIES = {"v1.6.1": "v1.6.2"}
"""Versions of kubevirt.io/api and client-go that stand for those that the proxy refuses."""
_ENVIRONMENT = {**os.environ, "GOSUMDB": "off", "GOFLAGS": "-buildvcs=false"}
"""The checksum database lacks one of the modules; go.sum has them all."""
_STUBS = {
    "api/core/names.go": "package core\n\nconst GroupName, SingularResourceName, "
    'PluralResourceName = "template.kubevirt.io", "one", "several"\n',
    "api/core/v1beta1/types.go": 'package v1beta1\n\nimport "k8s.io/api/core/v1"\n\n'
    "type VirtualMachineTemplate struct{ v1.ConfigMap }\n",
    "client-go/virttemplate/client.go": 'package virttemplate\n\nimport "k8s.io/client-go/rest"\n\n'
    "type Set struct{}\n\n"
    "func NewForConfig(*rest.Config) (*Set, error) { return nil, nil }\n"
    "func (*Set) TemplateV1beta1() *Set { return nil }\n"
    "func (*Set) RESTClient() rest.Interface { return nil }\n",
}
"""v1.9 imports these modules for VM templates, which the proxy refuses; nothing here calls them."""


def build(directory: Path, version: str = PINNED, **packages: str) -> None:
    """Programs in the directory, by name the package that each is made of."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go here: KubeVirt's code cannot be built")
    module, environment = ORACLE, _ENVIRONMENT
    if version != PINNED:
        module = directory / "module"
        _write_module(go, module, version)
        environment = environment | {"GOFLAGS": "-buildvcs=false -mod=mod"}
    tags = "libvirt_dlopen" + (",kubevirt1_6" if version.startswith("v1.6.") else "")
    for name, package in packages.items():
        argv = [go, "build", "-tags", tags, "-o", str(directory / name), package]
        built = subprocess.run(
            argv,
            cwd=module,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=3000,
        )
        assert built.returncode == 0, built.stderr


def _write_module(go: str, module: Path, version: str) -> None:
    """The oracle's programs with the replacements of KubeVirt's own go.mod of that version."""
    shutil.copytree(ORACLE, module, ignore=shutil.ignore_patterns("go.*"))
    argv = [go, "mod", "download", "-json", f"kubevirt.io/kubevirt@{version}"]
    found = subprocess.run(
        argv, cwd=module, env=_ENVIRONMENT, capture_output=True, text=True, check=False
    )
    at = re.search(r'"GoMod": "([^"]+)"', found.stdout)
    assert at is not None, found.stderr
    theirs = Path(at[1]).read_text()
    replaced = "".join(re.findall(r"^replace \(\n.*?^\)\n", theirs, re.MULTILINE | re.DOTALL))
    replaced = re.sub(r".*kubevirt\.io/.*=>.*\n", "", replaced)
    libraries = _LIBRARIES.get(version, version)
    lines = [
        "module homenode/kubevirt",
        re.search(r"^go .*", theirs, re.MULTILINE)[0],  # type: ignore[index]
        f"require kubevirt.io/kubevirt {version}",
        *(f"require kubevirt.io/{one} {libraries}" for one in ("api", "client-go")),
        replaced,
        *(
            f"replace kubevirt.io/{one} => kubevirt.io/{one} {libraries}"
            for one in ("api", "client-go")
        ),
    ]
    if "kubevirt.io/virt-template-api" in theirs:
        for path, text in _STUBS.items():
            stub = module / "stubs" / path
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(text)
        for one in ("api", "client-go"):
            name = f"kubevirt.io/virt-template-{one}"
            (module / "stubs" / one / "go.mod").write_text(f"module {name}\n")
            lines.append(f"replace {name} => ./stubs/{one}")
    (module / "go.mod").write_text("\n".join(lines) + "\n")
