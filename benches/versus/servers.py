"""Servers as processes: started, awaited, looked at from outside, stopped for a while, ended.

Memory and processor time are those of the process and its children, by Linux' /proc; elsewhere by `ps`.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

START_LIMIT = 300.0  # seconds until a server must answer
SETTLE = 2.0  # seconds in which a server does nothing, before its memory and idle time are read


class Server:
    """A running server. Use it in a `with` block: it ends at the block's end, whatever happens."""

    def __init__(self, name, launch, port):
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(part) for part in launch.command],
            env={**os.environ, **launch.environment},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self):
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def wait(self):
        """Until it says that it is well: then its model is loaded."""
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.said()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not come up within {START_LIMIT:.0f} s:\n{self.said()}")

    def said(self):
        """The end of its output."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 2000))
        return self.log.read().decode(errors="replace")

    def stop(self):
        """Takes its processor away until `go`: an idle server that spins must not slow the other."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go(self):
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self):
        if self.process.poll() is None:
            self.go()
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()

    def idle(self):
        """Resident bytes, and the share of one processor that it uses while nobody asks it anything."""
        time.sleep(SETTLE)
        before, began = self.seconds(), time.monotonic()
        time.sleep(SETTLE)
        share = (self.seconds() - before) / (time.monotonic() - began)
        return sum(resident(pid) for pid in self.pids()), share

    def seconds(self):
        return sum(processor_seconds(pid) for pid in self.pids())

    def pids(self):
        """It, and its children: they share a session."""
        if not Path("/proc/self/stat").exists():
            return [self.process.pid]
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
            except OSError:
                pass
        return found


def ps(pid, what):
    return subprocess.run(["ps", "-o", f"{what}=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def resident(pid):
    """Bytes of memory that a process has, pages of mapped files included."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 1024 * int(ps(pid, "rss") or 0) if not Path("/proc").exists() else 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:")), 0)


def processor_seconds(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        if Path("/proc").exists():
            return 0.0
        parts = [float(part) for part in ps(pid, "time").replace("-", ":").split(":") if part]
        return sum(part * 60**place for place, part in enumerate(reversed(parts)))
    # User and system time, the fields 14 and 15 of the whole line.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def physical_cores():
    """Cores without their second threads: what both servers are given."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        if shutil.which("sysctl"):
            said = subprocess.run(["sysctl", "-n", "hw.physicalcpu"], capture_output=True, text=True).stdout.strip()
            return int(said) if said.isdigit() else os.cpu_count()
        return os.cpu_count()
    cores, package = set(), "0"
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            package = value.strip()
        if key.strip() == "core id":
            cores.add((package, value.strip()))
    return min(len(cores) or os.cpu_count(), len(os.sched_getaffinity(0)))
