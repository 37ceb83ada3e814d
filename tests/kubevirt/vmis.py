"""Random VMIs, most of them wrong in one or two ways, and clusters that they arrive in."""

from random import Random
from typing import Any

Case = dict[str, Any]
_ANNOTATION = "hooks.kubevirt.io/hookSidecars"


def random_case(random: Random) -> Case:
    """{"config": KubeVirtConfiguration, "vmi": VirtualMachineInstance}."""
    cpu: Case = {"cores": random.choice((1, 2, 8)), "sockets": random.choice((1, 2))}
    cpu["threads"] = random.choice((1, 1, 1, 2))
    memory: Case = {"guest": "8Gi"}
    domain: Case = {"cpu": cpu, "memory": memory, "resources": {}, "devices": {}}
    if random.random() < 0.7:
        cpu["dedicatedCpuPlacement"] = True
        if random.random() < 0.5:
            cpu["isolateEmulatorThread"] = True
    if random.random() < 0.5:
        cpu["numa"] = {"guestMappingPassthrough": {}}
    if random.random() < 0.6:
        memory["hugepages"] = {"pageSize": random.choice(("2Mi", "1Gi"))}
    spec: Case = {"architecture": "amd64", "domain": domain}
    vmi: Case = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "default", "annotations": {}},
        "spec": spec,
    }
    for change in random.sample(_CHANGES, random.choice((0, 0, 1, 1, 2))):
        change(random, vmi)
    config: Case = {"developerConfiguration": {"featureGates": []}}
    for gate in _GATES:
        if random.random() < 0.7:
            config["developerConfiguration"]["featureGates"].append(gate)
    if random.random() < 0.1:
        config["emulatedMachines"] = ["q35*", "pc-i440fx*"]
    if random.random() < 0.1:
        config["architectureConfiguration"] = {"amd64": {"emulatedMachines": ["pc-q35-rhel9*"]}}
        if random.random() < 0.5:
            config["architectureConfiguration"]["amd64"]["machineType"] = "pc-q35-rhel9.6.0"
    if random.random() < 0.05:
        config["machineType"] = "pc-i440fx-7.2"
    return {"config": config, "vmi": vmi}


_GATES = (
    "Sidecar",
    "CPUManager",
    "HostDevices",
    "GPUsWithDRA",
    "HostDevicesWithDRA",
    "WorkloadEncryptionSEV",
    "WorkloadEncryptionTDX",
    "SecureExecution",
)


def _domain(vmi: Case) -> Case:
    found: Case = vmi["spec"]["domain"]
    return found


def _hook(_: Random, vmi: Case) -> None:
    vmi["metadata"]["annotations"][_ANNOTATION] = "[]"


def _host_devices(_: Random, vmi: Case) -> None:
    _domain(vmi)["devices"]["hostDevices"] = [{"name": "a", "deviceName": "x.com/y"}]


def _gpus(_: Random, vmi: Case) -> None:
    _domain(vmi)["devices"]["gpus"] = [{"name": "a", "deviceName": "nvidia.com/A100"}]


def _threads(random: Random, vmi: Case) -> None:
    _domain(vmi)["cpu"]["threads"] = random.choice((2, 3, 4))


def _arm(random: Random, vmi: Case) -> None:
    _domain(vmi)["cpu"]["threads"] = random.choice((1, 2))
    vmi["spec"]["architecture"] = "arm64"


def _odd_memory(random: Random, vmi: Case) -> None:
    _domain(vmi).setdefault("memory", {})["guest"] = random.choice(
        ("1500Mi", "8193Mi", "1Mi", "3G")
    )


def _page(random: Random, vmi: Case) -> None:
    size = random.choice(("big", "1Gi", "512Mi"))
    _domain(vmi).setdefault("memory", {"guest": "8Gi"})["hugepages"] = {"pageSize": size}


def _no_memory(_: Random, vmi: Case) -> None:
    _domain(vmi).pop("memory", None)


def _requests(random: Random, vmi: Case) -> None:
    resources = _domain(vmi)["resources"]
    for kind in random.sample(("requests", "limits"), random.choice((1, 2))):
        name = random.choice(("cpu", "memory"))
        value = (
            random.choice(("4", "8", "2500m"))
            if name == "cpu"
            else random.choice(("4Gi", "8Gi", "9Gi"))
        )
        resources.setdefault(kind, {})[name] = value


def _only_resources(random: Random, vmi: Case) -> None:
    kept = {
        k: v for k, v in _domain(vmi)["cpu"].items() if k not in ("cores", "sockets", "threads")
    }
    _domain(vmi)["cpu"] = kept
    if random.random() < 0.6:
        _domain(vmi)["resources"] = {"limits": {"cpu": random.choice(("4", "1500m"))}}


def _emulator(_: Random, vmi: Case) -> None:
    _domain(vmi)["cpu"]["isolateEmulatorThread"] = True


def _sockets(random: Random, vmi: Case) -> None:
    _domain(vmi)["cpu"]["maxSockets"] = random.choice((1, 2, 4))


def _feature(random: Random, vmi: Case) -> None:
    policy = random.choice(("require", "perhaps", ""))
    _domain(vmi)["cpu"]["features"] = [{"name": "vmx", "policy": policy}]


def _realtime(_: Random, vmi: Case) -> None:
    _domain(vmi)["cpu"]["realtime"] = {}


def _iothreads(random: Random, vmi: Case) -> None:
    _domain(vmi)["ioThreadsPolicy"] = random.choice(("auto", "supplementalPool", "mine"))
    if random.random() < 0.4:
        _domain(vmi)["ioThreads"] = {"supplementalPoolThreadCount": random.choice((0, 2))}


def _arm_model(random: Random, vmi: Case) -> None:
    _arm(random, vmi)
    _domain(vmi)["cpu"]["model"] = random.choice(("host-passthrough", "host-model", ""))


def _no_devices(random: Random, vmi: Case) -> None:
    _domain(vmi)["devices"] = {"gpus": [], "hostDevices": []}


def _default_architecture(_: Random, vmi: Case) -> None:
    del vmi["spec"]["architecture"]


def _page_alone(random: Random, vmi: Case) -> None:
    page = {"pageSize": random.choice(("2Mi", "1Gi"))}
    _domain(vmi)["memory"] = {"hugepages": page}


def _small_request(random: Random, vmi: Case) -> None:
    _domain(vmi)["resources"]["requests"] = {"memory": random.choice(("900k", "1M", "0"))}


def _device(random: Random, number: int) -> Case:
    device: Case = {"name": f"d{number}"}
    by = random.choice(("claim",) * 12 + ("name", "both", "none", "half"))
    if by in ("name", "both"):
        device["deviceName"] = "nvidia.com/A100"
    if by in ("claim", "both", "half"):
        device["claimName"] = random.choice(("a", "a", "a", "b"))
        if random.random() < 0.1:
            device["claimName"] = random.choice(("", None))
    if by in ("claim", "both"):
        device["requestName"] = random.choice(("r0", "r1", "r2", "r3"))
    return device


def _claims(random: Random, vmi: Case) -> None:
    devices = _domain(vmi)["devices"]
    for group in random.sample(("gpus", "hostDevices"), random.choice((1, 1, 2))):
        devices[group] = [_device(random, number) for number in range(random.choice((1, 1, 2, 3)))]
    names = random.choice((["a", "b"], ["a", "b"], ["a"], ["a", "a", "b"], []))
    vmi["spec"]["resourceClaims"] = [{"name": name, "resourceClaimName": "x"} for name in names]


def _good_claims(random: Random, vmi: Case) -> None:
    for group in random.sample(("gpus", "hostDevices"), random.choice((1, 2))):
        _domain(vmi)["devices"][group] = [
            {"name": f"{group.lower()}{n}", "claimName": "a", "requestName": f"{group.lower()}{n}"}
            for n in range(random.choice((1, 2)))
        ]
    vmi["spec"]["resourceClaims"] = [{"name": "a", "resourceClaimTemplateName": "x"}]


def _machine(random: Random, vmi: Case) -> None:
    types = ("q35", "pc-q35-7.2", "pc-q35-rhel9.6.0", "pc-i440fx-7.2", "pc", "virt", "")
    _domain(vmi)["machine"] = {"type": random.choice(types)}


def _firmware(random: Random, vmi: Case) -> None:
    efi: Case = {}
    for key in ("secureBoot", "persistent"):
        if random.random() < 0.6:
            efi[key] = random.choice((True, False, False))
    loader: Case = random.choice(
        ({"efi": efi}, {"efi": efi}, {"efi": efi, "bios": {}}, {"bios": {}})
    )
    _domain(vmi)["firmware"] = {"bootloader": loader}
    smm: Case = random.choice(({}, {"enabled": True}, {"enabled": False}))
    if random.random() < 0.5:
        _domain(vmi)["features"] = {"smm": smm}


def _encrypted(random: Random, vmi: Case) -> None:
    kinds = random.choice((["sev"], ["snp"], ["tdx"], ["tdx"], ["sev", "snp"], []))
    _domain(vmi)["launchSecurity"] = {kind: {} for kind in kinds}
    if kinds == ["sev"] and random.random() < 0.4:
        _domain(vmi)["launchSecurity"]["sev"] = {"attestation": {}}
    if random.random() < 0.3:
        vmi["spec"]["startStrategy"] = "Paused"
    if random.random() < 0.7:
        _domain(vmi)["firmware"] = {"bootloader": {"efi": {"secureBoot": False}}}
    if random.random() < 0.3:
        _firmware(random, vmi)
    if random.random() < 0.2:
        vmi["spec"]["architecture"] = random.choice(("arm64", "s390x"))
    if random.random() < 0.2:
        nic = {"name": "n", "masquerade": {}, "bootOrder": 1}
        _domain(vmi)["devices"]["interfaces"] = [nic]
        vmi["spec"]["networks"] = [{"name": "n", "pod": {}}]


_CHANGES = (
    _claims,
    _claims,
    _good_claims,
    _machine,
    _firmware,
    _encrypted,
    _encrypted,
    _arm_model,
    _no_devices,
    _default_architecture,
    _page_alone,
    _small_request,
    _hook,
    _host_devices,
    _gpus,
    _threads,
    _arm,
    _odd_memory,
    _page,
    _no_memory,
    _requests,
    _requests,
    _emulator,
    _only_resources,
    _sockets,
    _feature,
    _realtime,
    _iothreads,
)
