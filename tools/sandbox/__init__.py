"""Sandbox: run programs of other people or of models without harm to this machine.

    from cray_agents.tools.sandbox import Sandbox

    outcome = await Sandbox(seconds=5).run(["python3", "-c", "print(6 * 7)"])

The sandbox uses the better of two layers that works on this machine (backends.py): bubblewrap's
namespaces, or Landlock; both with a seccomp filter (seccomp.py). Both guarantee:

- The program writes no file outside its work folder, and reads only system folders, this Python's
  and `readable` ones.
- It has no network, no unix socket of the host, and no variable of this process's environment.
- It cannot signal, trace or slow other processes, and takes none of the host's terminals or
  asynchronous operations, whose numbers are limited.
- Time, memory, processes, disk and output have limits, and nothing outlives the run.
- If this process is root, the program still runs as an unprivileged user without capabilities. One
  exception: if the given folders (`readable`, a `workdir`), or this Python, are not open to all, it
  gets one capability, to read, or to write, the files that the layer allows.

Memory is the sum over processes of memory, swap and page tables, and the most that their sockets
can buffer. Buffers keep the system's size, and each socket beyond 64 counts in full. The sum is
checked every 25 ms, so processes can exceed it for a moment. One process alone cannot, except for
page tables of a quarter more, as it has at most 128 times its memory of addresses.

Not covered: bugs of the shared kernel; side channels between programs on one processor; with
`network=True`, the host's loopback, and data waiting in its stack. Not counted as memory: 64
sockets (some 27 MB), in Landlock those in flight between processes too (256, some 100 MB), 64 MB of
/dev/shm, pipes (64 MB of a user), file locks, and the kernel's own records of processes and files.
Disk is checked every 250 ms, which a program can write more in, and in the run's own folders and
deleted files that are open only, not in a given `workdir` or `writable`. Deleted files that are
only mapped, or in flight between processes (256 of `disk_mb` each), take the disk until the run
ends. If the removal of a full folder takes longer than 5 s, it goes on after `run` has returned.
The program may lock readable files (flock, and shared locks of fcntl) while it runs; leases are
refused.

Landlock reveals names and sizes of other files, and has no /dev/shm and no /proc. It cannot
restrict xattrs, chmod, chown and times to folders. It therefore refuses xattrs everywhere, and the
others by path for an ordinary user or with a given folder. The times of readable files can be set
through the open file; as root, the times of files that all users may write, too.
Read next: sandbox.py.
"""

from cray_agents.tools.sandbox.sandbox import Outcome, Sandbox

__all__ = ["Outcome", "Sandbox"]
