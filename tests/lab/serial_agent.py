"""A guest's agent without qemu-ga: a shell loop at its second serial port, and who asks it.

A request is a line "TOKEN VERB FILE LENGTH DATA"; an answer is a line "TOKEN ANSWER". Scripts,
their input and what they print go as base64, in lines that a terminal of 4096 characters takes. A
slow guest loses characters of a serial port: a request is repeated until it is answered; the guest
skips one that is not whole, and does one that it has done no second time.
"""

import shutil
import sys
from pathlib import Path

LOOP = """agent() {
  stty -F /dev/ttyS1 raw -echo 2>/dev/null || stty raw -echo </dev/ttyS1
  mkdir -p /tmp/agent && cd /tmp/agent || return
  last=
  while read -r token verb file length data; do
    [ "${#data}" = "$length" ] || continue
    if [ "$token" = "$last" ] && [ "$verb" != look ]; then echo "$token ok"; continue; fi
    last=$token
    case $verb in
      add) printf %s "$data" >>"$file" && echo "$token ok" ;;
      run)
        base64 -d "$file" >"$file.sh"
        base64 -d "$file.in" >"$file.stdin" 2>/dev/null
        (sh "$file.sh" <"$file.stdin" >"$file.out" 2>"$file.err"; : >"$file.end") </dev/null &
        echo "$token ok" ;;
      look)
        if [ -e "$file.end" ]; then
          printf '%s end %s. %s.\\n' "$token" \\
            "$(base64 "$file.out" | tr -d '\\n')" "$(base64 "$file.err" | tr -d '\\n')"
        else
          echo "$token busy"
        fi ;;
    esac
  done </dev/ttyS1 >/dev/ttyS1
}
while :; do agent; done &
"""
"""For a guest's init."""

CHANNEL = """<serial type='unix'>
      <source mode='bind' path='{socket}'/>
      <target port='1'/>
    </serial>
    <channel type='unix'>
      <source mode='bind' path='{socket}.channel'/>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>"""
"""Elements of a definition: the second serial port, and the channel that homenode looks for."""

_VIRSH = """#!/bin/sh
case "$*" in
  *qemu-agent-command*) exec {python} -I {asker} "$@" ;;
  *) exec {virsh} "$@" ;;
esac
"""
_ASKER = r"""import base64, json, os, socket, sys, time, uuid
asked = json.loads(sys.argv[sys.argv.index("--cmd") + 1])
given = asked["arguments"]
deadline = time.monotonic() + @SECONDS@


def ask(line, *, data=""):
    token = uuid.uuid4().hex[:12]
    seen, again = b"", 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= again:
            port.sendall(f"\n{token} {line} {len(data)} {data}\n".encode())
            again = time.monotonic() + 4
        try:
            seen += port.recv(65536)
        except TimeoutError:
            continue
        for answer in seen.split(b"\n")[:-1]:
            own, _, rest = answer.strip().decode("ascii", "replace").partition(" ")
            if own == token:
                return rest
    sys.exit("error: Guest agent is not responding: the guest has not answered at its port")


port = socket.socket(socket.AF_UNIX)
port.settimeout(0.5)
try:
    port.connect("@SOCKET@")
except OSError as error:
    sys.exit(f"error: Guest agent is not responding: {error}")
if asked["execute"] == "guest-exec":
    number = int.from_bytes(os.urandom(3), "big")
    script = base64.b64encode(given["arg"][1].encode()).decode()
    for file, text in ((f"{number}", script), (f"{number}.in", given.get("input-data", ""))):
        for at in range(0, len(text), 3000):
            ask(f"add {file}", data=text[at : at + 3000])
    ask(f"run {number}")
    answer = {"pid": number}
else:
    said = ask(f"look {given['pid']}").split(" ")
    answer = {"exited": said[0] == "end"}
    if answer["exited"]:
        answer |= {"exitcode": 0, "out-data": said[1][:-1], "err-data": said[2][:-1]}
print(json.dumps({"return": answer}))
"""


def agent_virsh(directory: Path, socket: Path, answer_s: int = 120) -> Path:
    """The directory to put first on PATH: its `virsh` asks the guest at this socket. answer_s: for
    one line, however slowly it is emulated."""
    virsh = shutil.which("virsh")
    assert virsh is not None, "virsh"
    program, asker = directory / "bin" / "virsh", directory / "asker.py"
    program.parent.mkdir()
    asker.write_text(_ASKER.replace("@SOCKET@", str(socket)).replace("@SECONDS@", str(answer_s)))
    program.write_text(_VIRSH.format(python=sys.executable, asker=asker, virsh=virsh))
    program.chmod(0o755)
    return program.parent
