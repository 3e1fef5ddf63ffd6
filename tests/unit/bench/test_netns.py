"""Network namespaces joined by a relay: datagrams between nodes, their delays and losses, and a clean end.

The relay runs in namespaces of networks and of mounts of its own, so the test changes nothing of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

APART = ["unshare", "--net", "--mount", "sh", "-c"]
SPACES = "mount -t tmpfs none /run && mkdir /run/netns && test -w /dev/net/tun && ip netns list"
pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*APART, SPACES], capture_output=True).returncode != 0,
    reason="this user makes no namespaces of networks, or no TUN devices",
)

DATAGRAMS, SIZE = 40, 1000
THERE, BACK = 0.02, 0.05  # seconds in the two directions between nodes 0 and 1
ECHO = """
import socket, sys
node = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
node.bind((sys.argv[1], 7000))
print("listens", flush=True)
while True:
    node.sendto(*node.recvfrom(2000))
"""
PROGRAM = f"""
import json, socket, subprocess, sys, time
from benchmarks.netns import address, inside
echo = {ECHO!r}
nodes = [
    subprocess.Popen([*inside(node), sys.executable, "-c", echo, address(node)], stdout=subprocess.PIPE)
    for node in (1, 2)
]
for each in nodes:
    each.stdout.readline()
found = []
for node, patience in ((2, 1), (1, 30)):  # of the lossy link, the wait for the last datagram always ends without one
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.settimeout(patience)
    started, numbers, times = time.monotonic(), [], []
    for number in range({DATAGRAMS}):
        client.sendto(number.to_bytes(2, "big") * {SIZE // 2}, (address(node), 7000))
    try:
        while len(numbers) < {DATAGRAMS}:
            data, sender = client.recvfrom(2000)
            assert sender == (address(node), 7000) and data == data[:2] * {SIZE // 2}
            numbers.append(int.from_bytes(data[:2], "big"))
            times.append(time.monotonic() - started)
    except TimeoutError:
        pass
    found.append([numbers, min(times)])
alone = socket.socket()
alone.settimeout(1)
found.append(alone.connect_ex(("192.0.2.1", 80)) != 0)
for each in nodes:
    each.kill()
print(json.dumps(found), flush=True)
sys.exit(7)
"""


def test_a_relay_delays_and_loses_packets_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    links = {"0:1": {"delay": THERE, "jitter": 0.01}, "1:0": {"delay": BACK}, "0:2": {"loss": 0.5}}
    given = " ".join(f"--link {pair} '{json.dumps(link)}'" for pair, link in links.items())
    relay = f"{sys.executable} -m benchmarks.netns --nodes 3 --delay 0 {given} -- {sys.executable} program.py"
    after = "echo $?; ip netns list; ip -o link"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [*APART, f"{SPACES} && {relay}; {after}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    lines = ran.stdout.splitlines()
    lossy, (whole, first), closed = json.loads(lines[0])
    assert whole == list(range(DATAGRAMS)), "packets keep their order"
    assert first >= THERE + BACK
    assert 0 < len(lossy[0]) < DATAGRAMS and lossy[0] == sorted(lossy[0])
    assert closed, "a node reaches the other nodes alone"
    assert lines[1] == "7", "the status of the command"
    assert [line.split()[1] for line in lines[2:]] == ["lo:"], ran.stdout
    assert not ran.stderr
