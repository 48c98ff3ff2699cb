"""Programs of other people, models among them, run where they can do no harm.

    from cray_agents.tools.sandbox import Sandbox

    outcome = await Sandbox(seconds=5).run(["python3", "-c", "print(6 * 7)"])

Of two layers, the better one that works here is used (layers.py): bubblewrap's namespaces, or
Landlock; both with a seccomp filter (seccomp.py). What holds in both: no file outside the work
folder is written, and only system folders, this Python's and `readable` ones are read; no network,
no unix socket of the host; no variable of this process's environment; other processes cannot be
signalled, traced or slowed; time, memory, processes, disk and output have limits; nothing outlives
the run; as root, the program still runs as an unprivileged user, and has no capability unless what
is given (`readable`, a `workdir`), or this Python, is not open to all: then one, to read, or to
write, what the layer lets it open.

Memory is what processes hold, in memory and swap, with their page tables, and what their sockets
can hold: buffers keep the system's size, and each socket beyond 64 counts with all of it. It is
counted every 25 ms, so that processes can for a moment exceed the sum; each alone cannot, but for
page tables of a quarter more, for a process has at most 128 times its memory of addresses.

Not covered: bugs of the kernel, which is shared; side channels between programs on one processor;
with `network=True`, the host's loopback, and what waits in its stack. Not counted as memory: 64
sockets (some 27 MB), in Landlock those in flight between processes too (256, some 100 MB), 64 MB of
/dev/shm, pipes (64 MB of a user), file locks, and the kernel's own records of processes and files.
Disk is counted every 250 ms and in the run's own folders only, not in a `workdir` or `writable`
that is given, and not in files deleted while open; a folder so full that its removal takes longer
than 5 s is removed after `run` returned. What may be read may also be locked (flock, and shared
locks of fcntl), for as long as the program runs; leases are refused. Landlock lets names and sizes
of other files be seen, and has no /dev/shm and no /proc; it refuses xattrs everywhere and, for an
ordinary user or with a folder that is given, chmod, chown and times by path, because it cannot tell
where; the times of what may be read can be set through the open file, and as root those of files
that all users may write.
Read next: sandbox.py.
"""

from cray_agents.tools.sandbox.sandbox import Outcome, Sandbox

__all__ = ["Outcome", "Sandbox"]
