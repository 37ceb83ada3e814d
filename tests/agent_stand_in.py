"""A stand-in for a guest with an agent: a virsh that carries guest-exec out on this machine.

It answers as qemu-ga does: at once with a process number, and with what came of it when asked.
"""

import sys
from pathlib import Path

UUID = "6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49"

_PROGRAM = r"""#!@PYTHON@ -I
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


def agent_stand_in(directory: Path) -> Path:
    """Makes it; put DIRECTORY/bin first on PATH. Returns the directory of its settings."""
    state = directory / "agent"
    state.mkdir()
    (directory / "bin").mkdir()
    program = directory / "bin" / "virsh"
    program.write_text(_PROGRAM.replace("@PYTHON@", sys.executable).replace("@STATE@", str(state)))
    program.chmod(0o755)
    return state
