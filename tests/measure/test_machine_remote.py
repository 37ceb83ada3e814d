"""A guest is reached by ssh or by its agent, whatever its shell is, and is the same Machine."""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import ToolError, UsageError
from homenode.machine.discover.host import discover
from homenode.measure.access import remote, ssh
from homenode.measure.access.machine import ScriptOutput
from homenode.measure.access.remote import RemoteMachine, format_sh_line, run_script
from homenode.measure.access.ssh import HostKeyError, SshChannel
from homenode.measure.trial.guest import GuestAgent, GuestReach
from homenode.process import ToolMissingError, ToolTimeoutError
from homenode.vm.hypervisor.connection import GuestAccess
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import load_host
from tests.processes import write_program
from tests.same_machine import check_same_machine
from tests.ssh_targets import new_key, ssh_target

SHELLS = {"bash": ("bash", "--norc"), "dash": ("dash",), "busybox": ("busybox", "sh")}
UUID = "6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49"

AGENT = r"""#!@PYTHON@ -I
import base64, json, pathlib, subprocess, sys
state = pathlib.Path("@STATE@")
words = sys.argv[4:]
assert words[0] == "qemu-agent-command", words
asked = json.loads(words[words.index("--cmd") + 1])
if (state / "silent").exists():
    sys.exit("error: Guest agent is not responding: QEMU guest agent is not connected")
if (state / "blocked").exists():
    sys.exit("error: internal error: unable to execute QEMU agent command 'guest-exec': "
             "Command guest-exec has been disabled")
wanted = asked["arguments"]
if asked["execute"] == "guest-exec":
    fed = base64.b64decode(wanted.get("input-data", ""))
    with (state / "out").open("wb") as out, (state / "err").open("wb") as err:
        done = subprocess.run(
            [wanted["path"], *wanted["arg"]], input=fed, stdout=out, stderr=err, check=False
        )
    answer = {"pid": 7}
else:
    answer = {"exited": True, "exitcode": 0}
    for name in ("out", "err"):
        content = (state / name).read_bytes()
        if content:
            answer[name + "-data"] = base64.b64encode(content).decode()
        if (state / "cut").exists():
            answer[name + "-truncated"] = True
print(json.dumps({"return": answer}))
"""
"""A virsh that carries guest-exec out here and answers as qemu-ga does: with a process number at
once, with what came of it when asked."""


class Shell:
    """A channel to a shell of this machine."""

    name = "vm7"
    most_input_bytes: int | None = None

    def __init__(self, shell: str) -> None:
        self._argv = SHELLS[shell]
        if shutil.which(self._argv[0]) is None:
            pytest.skip(f"no {self._argv[0]} here")

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        argv = [*self._argv, "-c", script]
        fed = (input or "").encode()
        done = subprocess.run(argv, input=fed, capture_output=True, check=False)
        outputs = (done.stdout, done.stderr)
        return ScriptOutput(*(output.decode("utf-8", "replace") for output in outputs))

    def close(self) -> None:
        """Nothing stays open."""


def agent_stand_in(directory: Path) -> Path:
    """Makes it; put DIRECTORY/bin first on PATH. Returns the directory of its settings."""
    state = directory / "agent"
    state.mkdir()
    text = AGENT.replace("@PYTHON@", sys.executable).replace("@STATE@", str(state))
    write_program(directory / "bin" / "virsh", text)
    return state


@pytest.fixture(params=["bash", "dash", "busybox", "agent"])
def machine(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
) -> Iterator[RemoteMachine]:
    if request.param == "agent":
        agent_stand_in(tmp_path)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        found = RemoteMachine(GuestAgent(Virsh("qemu:///system"), UUID, "vm7"))
    else:
        found = RemoteMachine(Shell(request.param))
    yield found
    found.clean_up()
    assert not there(names), "something was left behind"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What this test names its directories there: other tests make theirs next to it."""
    made: list[str] = []
    random = secrets.token_hex

    def token_hex(nbytes: int) -> str:
        made.append(f"homenode-{random(nbytes)}")
        return made[-1].removeprefix("homenode-")

    monkeypatch.setattr(secrets, "token_hex", token_hex)
    yield made
    for path in there(made):
        shutil.rmtree(path, ignore_errors=True)


def there(names: Sequence[str]) -> list[Path]:
    paths = (Path(directory) / name for directory in ("/run", "/tmp", "/dev/shm") for name in names)
    return [path for path in paths if path.exists()]


def test_a_program_gets_its_words_its_input_and_its_variables(machine: RemoteMachine) -> None:
    words = ("a b", "$HOME", "it's", "*", 'a"b', "tab\there", "é")
    said = machine.run(("printf", "%s\\n", *words), 120)
    assert said.returncode == 0
    assert said.stdout.splitlines() == list(words)
    # More than a terminal takes in a line and holds unread, in letters that pieces cut in two.
    fed = "\n".join("é" * 10_000 for _ in range(12)) + "\nno newline at the end"
    assert machine.run(("cat",), 120, fed).stdout == fed
    failing = ("sh", "-c", 'echo "$A"; echo wrong >&2; exit 3')
    said = machine.run(failing, 120, environment={"A": "b c"})
    assert (said.returncode, said.stdout, said.stderr) == (3, "b c\n", "wrong\n")


def test_what_a_program_says_cannot_be_mistaken_for_its_end(machine: RemoteMachine) -> None:
    said = machine.run(("printf", "homenode-0000 0\\n+end\\n\\003\\004\\033[2J"), 120)
    assert said.stdout == "homenode-0000 0\n+end\n\x03\x04\x1b[2J"


def test_a_missing_program_and_a_slow_one_are_distinguished(machine: RemoteMachine) -> None:
    with pytest.raises(ToolMissingError, match="nvbandwidth"):
        machine.run(("nvbandwidth",), 120)
    with pytest.raises(ToolTimeoutError, match="no end after 1 s"):
        machine.run(("sleep", "30"), 1)
    assert machine.run(("echo", "still there"), 120).stdout == "still there\n"


def test_only_what_is_installed_is_said_to_be(machine: RemoteMachine) -> None:
    assert machine.find_installed(("sh", "nvbandwidth", "cat")) == {"sh", "cat"}


def test_a_program_is_put_there_whole_and_found_by_its_name(machine: RemoteMachine) -> None:
    program = b'#!/bin/sh\necho probe "$1"\n# ' + bytes(range(256)) * 200
    path = machine.put_program("homenode-test-probe", program)
    assert Path(path).read_bytes() == program
    assert machine.find_installed(("homenode-test-probe",)) == {"homenode-test-probe"}
    assert machine.run(("homenode-test-probe", "x"), 120).stdout == "probe x\n"
    machine.clean_up()
    assert not Path(path).exists()
    assert machine.find_installed(("homenode-test-probe",)) == frozenset()


def test_a_snapshot_is_taken_there(machine: RemoteMachine) -> None:
    check_same_machine(discover(machine.snapshot()), load_host(None))


def test_an_agent_whose_program_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: passed.append(passed.pop() + seconds))

    class Never:
        def agent_command(self, uuid: str, command: str, timeout_s: int) -> str:
            passed[0] += 5
            return '{"return": {"pid": 7, "exited": false}}'

    agent = GuestAgent(Never(), UUID, "vm7")  # type: ignore[arg-type]
    with pytest.raises(ToolTimeoutError):
        agent.execute("true", 30)
    assert passed[0] < 120


def test_what_is_sent_in_pieces_has_a_deadline_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])

    class Slow(Shell):
        most_input_bytes = 1_000

        def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
            passed[0] += 59
            return super().execute(script, timeout_s, input)

    machine = RemoteMachine(Slow("dash"))
    with pytest.raises(ToolTimeoutError, match="expected it to take"):
        machine.run(("cat",), 30, "x" * 100_000)
    machine.clean_up()
    assert passed[0] < 600


def test_an_ssh_that_never_ends_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "ssh", "#!/bin/sh\nwhile :; do echo y; sleep 0.1; done\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh, "_CONNECT_S", 0)
    monkeypatch.setattr(ssh, "_GRACE_S", 0.5)
    with pytest.raises(ToolTimeoutError):
        SshChannel("vm7", "root", tmp_path / "known").execute("true", 1)


@pytest.mark.parametrize(
    "lost",
    ["client_loop: send disconnect: Broken pipe", "Connection to vm7 closed by remote host."],
)
def test_a_restart_is_explained(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "ssh", f"#!/bin/sh\necho {shlex.quote(lost)} >&2; exit 255\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ToolError, match=re.escape(lost)) as raised:
        SshChannel("vm7", "root", tmp_path / "known").execute("true", 1)
    assert "restarted" in str(raised.value.hint)


def test_a_missing_agent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = agent_stand_in(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    machine = RemoteMachine(GuestAgent(Virsh("qemu:///system"), UUID, "vm7"))
    for trouble, word in (("silent", "not connected"), ("blocked", "disabled")):
        (state / trouble).touch()
        with pytest.raises(ToolError, match=word) as raised:
            machine.run(("true",), 60)
        assert "qemu-guest-agent" in str(raised.value.hint)
        (state / trouble).unlink()
    (state / "cut").touch()
    with pytest.raises(ToolError, match="cut short"):
        machine.run(("true",), 60)


@pytest.mark.parametrize(
    ("address", "user", "port"),
    [("-oProxyCommand=x", "root", 22), ("a b", "root", 22), ("vm7", "-x", 22), ("vm7", "root", 0)],
)
def test_options_of_ssh_are_refused(address: str, user: str, port: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        SshChannel(address, user, tmp_path / "known", port)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs openssh-client")
def test_ssh_lends_a_guest_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh -G prints the options that hold, those of the user's configuration among them."""
    (tmp_path / "config").write_text(
        "Host *\n  ForwardAgent yes\n  ForwardX11 yes\n  ForwardX11Trusted yes\n"
        "  PermitLocalCommand yes\n  LocalCommand touch /tmp/x\n  Tunnel yes\n"
        "  GSSAPIDelegateCredentials yes\n  LocalForward 8080 localhost:80\n"
        "  RemoteForward 9090 localhost:22\n  DynamicForward 1080\n"
        "  ProxyJump jump.example.org\n  IdentityFile ~/.ssh/of-the-lab\n"
    )
    text = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config -G "$@"\n'
    write_program(tmp_path / "bin/ssh", text)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    target = SshChannel("vm7", "root", tmp_path / "known", 2222)
    options = dict(
        line.split(" ", 1) for line in target.execute("true", 60).stdout.splitlines() if " " in line
    )
    for name in ("forwardagent", "forwardx11", "forwardx11trusted", "permitlocalcommand", "tunnel"):
        assert options[name] in ("no", "false"), name
    assert options.get("gssapidelegatecredentials", "no") == "no"
    assert options["clearallforwardings"] == "yes"
    assert (options["proxyjump"], options["port"]) == ("jump.example.org", "2222")
    assert options["identityfile"] == "~/.ssh/of-the-lab"


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[SshChannel]:
    with ssh_target(tmp_path) as found:
        yield found


@pytest.mark.root
def test_a_guest_is_reached_by_ssh(sshd: SshChannel) -> None:

    machine = RemoteMachine(sshd)
    words = ("sh", "-c", 'cat; echo "$A" >&2; exit 4')
    said = machine.run(words, 120, "a'b\n", environment={"A": "$x"})
    assert (said.returncode, said.stdout, said.stderr) == (4, "a'b\n", "$x\n")
    with pytest.raises(ToolTimeoutError):
        machine.run(("sleep", "30"), 1)
    path = machine.put_program("homenode-test-probe", b"#!/bin/sh\necho probe\n")
    assert machine.run(("homenode-test-probe",), 120).stdout == "probe\n"
    machine.clean_up()
    assert not Path(path).exists()
    check_same_machine(discover(machine.snapshot()), load_host(None))
    assert sshd.known_hosts.exists(), "its key is stored next to the trial, not in the user's file"


@pytest.mark.root
def test_a_wrong_key_and_a_closed_port_are_named(sshd: SshChannel, tmp_path: Path) -> None:
    wrong = RemoteMachine(replace(sshd, key=tmp_path / "other_key"))
    with pytest.raises(ToolError, match="Permission denied") as raised:
        wrong.run(("true",), 60)
    assert "--ssh-key" in str(raised.value.hint)
    with pytest.raises(ToolError, match="Connection refused"):
        RemoteMachine(replace(sshd, port=1)).run(("true",), 60)


@pytest.mark.root
@pytest.mark.parametrize(
    "kind",
    ["ed25519", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("ecdsa", "rsa"))],
)
def test_a_guest_with_another_host_key_is_refused(sshd: SshChannel, kind: str) -> None:
    """Also where the new one is of another kind, which ssh itself would take for one more key."""
    guest = replace(sshd, guest="6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49")
    for _ in range(2):
        assert guest.execute("echo there", 60).stdout == "there\n"
    kept = sshd.known_hosts.read_text()
    assert [line.split()[0] for line in kept.splitlines()] == [guest.guest]
    elsewhere = replace(guest, address="localhost")
    assert elsewhere.execute("echo there", 60).stdout == "there\n"
    new_key(sshd.known_hosts.parent / "host_key", kind)
    for channel in (guest, elsewhere):
        with pytest.raises(HostKeyError, match="expected the host key of the first") as raised:
            channel.execute("echo there", 60)
        assert "ssh-keygen -R" in str(raised.value.hint)
    assert sshd.known_hosts.read_text() == kept
    sshd.known_hosts.unlink()
    assert guest.execute("echo there", 60).stdout == "there\n"


@pytest.mark.root
def test_a_machine_that_lets_no_one_in_is_not_the_first_login(sshd: SshChannel) -> None:
    """It may be whoever had the guest's address before."""
    with pytest.raises(ToolError, match="Permission denied"):
        replace(sshd, key=sshd.known_hosts.parent / "other_key").execute("true", 60)
    new_key(sshd.known_hosts.parent / "host_key")
    assert sshd.execute("echo there", 60).stdout == "there\n"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A directory of a disk that has room for little more than another directory."""
    directory = tmp_path / "full"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.mark.root
@pytest.mark.parametrize("shell", SHELLS)
def test_programs_are_put_where_there_is_room_for_them(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    monkeypatch.setattr(remote, "_DIRECTORIES", (str(full), str(roomy)))
    machine = RemoteMachine(Shell(shell))
    path = Path(machine.put_program("homenode-test-probe", secrets.token_bytes(256 << 10)))
    assert path.parent.parent == roomy
    machine.clean_up()
    assert not [*full.iterdir(), *roomy.iterdir()]


def test_a_failed_copy_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: RemoteMachine, *words: object) -> None:
        raise ToolError("no space", hint="is its disk full?")

    monkeypatch.setattr(remote, "_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(RemoteMachine, "_put_file", fail)
    virsh = Virsh("qemu:///system")
    reach = GuestReach(virsh, GuestAccess(), tmp_path / "known_hosts", b"probe")
    with pytest.raises(ToolError, match="no space"):
        reach.equip(RemoteMachine(Shell("bash")))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("packers", [("base64", "gzip"), ("base64",)])
def test_a_packed_program_runs(packers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = RemoteMachine(Shell("busybox"))
    installed = machine.find_installed
    monkeypatch.setattr(
        RemoteMachine, "find_installed", lambda self, names: installed(names) & frozenset(packers)
    )
    program = b"#!/bin/sh\necho probe\n# " + bytes(range(256)) * 20
    path = machine.put_program("homenode-test-probe", program)
    assert Path(path).read_bytes() == program
    machine.clean_up()


LOGIN_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "tcsh")
WORDS = ("a b", "it's", '"x"', "$HOME `id` $(id)", "a\\b \\\\ \\' \\n %s %%", "!! !$", "a\nb", "é")


@pytest.mark.parametrize("shell", [shell for shell in LOGIN_SHELLS if shutil.which(shell)])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_given_on_unchanged(shell: str, word: str) -> None:
    line = format_sh_line(run_script(("printf", "%s|", word, "last"), 10, "MARK"))
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == f"{word}|last|", done.stderr
    assert done.stderr.endswith("\nMARK 0\n")


@pytest.mark.parametrize("shell", [shell for shell in LOGIN_SHELLS if shutil.which(shell)])
def test_standard_input_stays_the_scripts(shell: str) -> None:
    line = format_sh_line("read -r a; printf '%s!\\n' \"$a\"")
    done = subprocess.run([shell, "-c", line], input="data\n", capture_output=True, text=True)
    assert done.stdout == "data!\n", done.stderr
