"""Programs of other people, models among them, run where they can do no harm.

    from cray_agents.tools.sandbox import Sandbox

    outcome = await Sandbox(seconds=5).run(["python3", "-c", "print(6 * 7)"])

Of two layers, the better one that works here is used (layers.py): bubblewrap's namespaces, or
Landlock; both with a seccomp filter (seccomp.py). What holds in both: no file outside the work
folder is written, and only system folders, this Python's and `readable` ones are read; no network,
no unix socket of the host; no variable of this process's environment; other processes cannot be
signalled, traced or slowed; time, memory, processes, disk and output have limits; nothing outlives
the run; as root, the program still runs as an unprivileged user.

Not covered: bugs of the kernel, which is shared; side channels between programs on one processor;
with `network=True`, the host's loopback. Memory is counted every 25 ms, so that many processes can
for a moment exceed their sum (each alone cannot); disk every 250 ms and in the run's own folders
only, not in a `workdir` or `writable` that is given, and not in files deleted while open. Landlock
lets names and sizes of other files be seen, and has no /dev/shm and no /proc; for an ordinary user,
or with a folder that is given, it refuses chmod, chown, xattrs and times by path everywhere,
because it cannot tell where; the times of what may be read can be set through the open file.
Read next: sandbox.py.
"""

from cray_agents.tools.sandbox.sandbox import Outcome, Sandbox

__all__ = ["Outcome", "Sandbox"]
