"""A machine of its own for a test: the real systemd of this one as process 1 of new namespaces.

Its root is an overlay of ours, so whatever is written there is gone with it. Needs root, systemd,
util-linux, iproute2, a cgroup2 mount and overlayfs; boots in about half a second.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from waiting import eventually

TOOLS = ("unshare", "nsenter", "systemctl", "journalctl", "ip", "tc", "mount", "pivot_root")
KINDS = ("--mount", "--cgroup", "--pid", "--ipc", "--uts")
APART = ("unshare", *KINDS, "--fork", "--kill-child", "--propagation", "private")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
TARGET = "[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n"
MASKED = """
systemd-udevd.service systemd-udev-trigger.service systemd-timesyncd.service
systemd-networkd.service systemd-resolved.service systemd-logind.service getty.target
systemd-tmpfiles-clean.timer apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer
fstrim.timer dpkg-db-backup.timer sys-kernel-debug.mount sys-kernel-tracing.mount
sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount dev-mqueue.mount
modprobe@.service kmod-static-nodes.service systemd-modules-load.service systemd-sysctl.service
systemd-random-seed.service systemd-update-utmp.service systemd-remount-fs.service
systemd-binfmt.service proc-sys-fs-binfmt_misc.automount systemd-firstboot.service
systemd-sysusers.service
"""
# rshared: systemd does that itself outside of containers only, and LoadCredential= needs it.
BOOT = r"""
set -e
mount -t tmpfs -o mode=755,size=2g tmpfs "$BASE"
mkdir "$BASE/upper" "$BASE/work" "$BASE/root"
R="$BASE/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$BASE/upper,workdir=$BASE/work" "$R"
mount -t proc proc "$R/proc"
mount -t sysfs -o ro sysfs "$R/sys"
mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid tmpfs "$R/dev"
for node in null zero full random urandom tty; do
    touch "$R/dev/$node"
    mount --bind "/dev/$node" "$R/dev/$node"
done
ln -s /proc/self/fd "$R/dev/fd"
mkdir "$R/dev/shm" "$R/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
ln -s pts/ptmx "$R/dev/ptmx"
mount -t tmpfs -o mode=755 tmpfs "$R/run"
mount -t tmpfs -o mode=1777 tmpfs "$R/tmp"
rm -rf "$R"/etc/systemd/system/* "$R"/var/log/journal
cp -a "$STAGE/." "$R/"
while IFS=: read -r from to; do
    [ -n "$from" ] || continue
    mkdir -p "$R$to"
    mount --bind "$from" "$R$to"
    mount -o remount,bind,ro "$R$to"
done <<< "$BINDS"
for unit in $MASKED; do ln -sf /dev/null "$R/etc/systemd/system/$unit"; done
cd "$R"
mkdir -p oldroot
pivot_root . oldroot
cd /
umount -l /oldroot
mount --make-rshared /
exec env -i "PATH=$PATH" container=sdbox LANG=C.UTF-8 \
    /lib/systemd/systemd --system --show-status=no < /dev/null
"""


PROBE = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root &&
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root &&
mount -t sysfs -o ro sysfs /mnt/root/sys && mount -t cgroup2 cgroup2 /mnt/root/sys/fs/cgroup
"""


@lru_cache
def missing() -> str:
    """Why no box can be had here; empty when it can."""
    if os.geteuid() != 0:
        return "systemd in namespaces needs root"
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if not Path("/lib/systemd/systemd").exists():
        absent.append("systemd")
    if absent:
        return f"not installed: {', '.join(absent)}"
    if not _cgroup_mount():
        return "there is no cgroup2 mount"
    done = subprocess.run([*APART, "bash", "-c", PROBE], capture_output=True, text=True)
    words = " ".join(done.stderr.split())
    return f"namespaces or overlays are not allowed here: {words}" if done.returncode else ""


def _cgroup_mount() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    return None


class Box:
    """Boots when it is entered. Commands run in all of its namespaces."""

    def __init__(
        self,
        name: str,
        *,
        netns: str | None = None,
        tree: Path | None = None,
        binds: Mapping[Path, str] | None = None,
    ) -> None:
        """netns: the network it lives in. tree: laid over the root, with owners and modes.
        binds: directories of ours that it sees read-only at another place."""
        self.name, self._netns, self._tree, self._binds = name, netns, tree, dict(binds or {})
        self._pid = 0

    def __enter__(self) -> "Box":
        self._directory = Path(tempfile.mkdtemp(prefix=f"sdbox-{self.name}-"))
        mount = _cgroup_mount()
        assert mount is not None
        self._cgroup = mount / f"sdbox-{self.name}-{os.getpid()}"
        self._cgroup.mkdir()
        log = self._directory / "boot.log"
        enter = f'echo $$ > "{self._cgroup}/cgroup.procs" && exec "$@"'
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["bash", "-c", enter, "-", *self._command()],
                stdout=file,
                stderr=file,
                env=self._environment(),
            )
        try:
            eventually(self._booted, f"{self.name} has booted", 30)
        except AssertionError:
            words = log.read_text(errors="replace")
            self.__exit__(None, None, None)
            raise AssertionError(f"{self.name} has not booted: {words}") from None
        return self

    def _command(self) -> list[str]:
        inside = ["nsenter", f"--net=/run/netns/{self._netns}"] if self._netns else []
        return [*inside, *APART, "bash", "-c", BOOT]

    def _environment(self) -> dict[str, str]:
        stage, base = self._directory / "stage", self._directory / "base"
        base.mkdir()
        if self._tree is not None:
            shutil.copytree(self._tree, stage, symlinks=True)
        system = stage / "etc/systemd/system"
        system.mkdir(parents=True, exist_ok=True)
        stage.chmod(0o755)  # the root gets its mode
        (system / "box.target").write_text(TARGET)
        (system / "default.target").symlink_to("box.target")
        (stage / "etc/hostname").write_text(f"{self.name}\n")
        (stage / "etc/machine-id").write_text(f"{os.urandom(16).hex()}\n")
        (stage / "etc/fstab").write_text("")
        binds = "\n".join(f"{source}:{place}" for source, place in self._binds.items())
        return {
            "PATH": PATH,
            "BASE": str(base),
            "STAGE": str(stage),
            "BINDS": binds,
            "MASKED": " ".join(MASKED.split()),
        }

    def _booted(self) -> bool:
        assert self._process.poll() is None, "it ended"
        if not self._pid:
            self._pid = self._first_process()
            return False
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def _first_process(self) -> int:
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
            except OSError:  # it has gone
                continue
        return 0

    def run(
        self, *command: str, check: bool = True, text: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """text: its standard input."""
        spaces = ["nsenter", "-t", str(self._pid), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        done = subprocess.run(
            [*spaces, "env", "-i", f"PATH={PATH}", *command],
            input=text,
            text=True,
            capture_output=True,
            timeout=100,
        )
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def systemctl(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.run("systemctl", "--no-pager", *words, check=check)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        text = self.systemctl("show", unit, "-p", ",".join(properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def wait(self, unit: str, seconds: float = 40, **wanted: str | Callable[[str], bool]) -> None:
        """Until the unit's properties are, or satisfy, these."""

        def reached() -> bool:
            nonlocal state
            state = self.show(unit, *wanted)
            return all(
                want(state[name]) if callable(want) else state[name] == want
                for name, want in wanted.items()
            )

        state: dict[str, str] = {}
        try:
            eventually(reached, f"{unit} of {self.name}: {sorted(wanted)}", seconds)
        except AssertionError as error:
            journal = self.run("journalctl", "--no-pager", "-n", "60", check=False).stdout
            raise AssertionError(f"{error}; it is {state}\n{journal}") from None

    def journal(self, unit: str) -> str:
        """What the unit's processes and systemd said of it, a message a line."""
        text = self.run("journalctl", "-o", "json", "-u", unit).stdout
        entries = [json.loads(line) for line in text.splitlines()]
        return "\n".join(str(entry.get("MESSAGE", "")) for entry in entries)

    def wait_journal(self, unit: str, words: str, seconds: float = 40) -> None:
        try:
            eventually(lambda: words in self.journal(unit), words, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.journal(unit)}") from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid and self._process.poll() is None:
            os.kill(self._pid, signal.SIGKILL)  # with it everything in its namespaces
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        eventually(self._remove_cgroup, "the box's cgroups are empty", 20)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _remove_cgroup(self) -> bool:
        for directory, _, _ in os.walk(self._cgroup, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:  # a process is still ending
                return False
        return not self._cgroup.exists()
