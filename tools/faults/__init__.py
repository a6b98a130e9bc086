"""Faults that a cache's directory may meet, and how what it holds afterwards is judged: one home for the crash matrix
(`python -m tests.crash`), the soak (`python -m tools.soak`) and single tests.

    shim, shim.c    below glibc, on Linux: the Nth call kills, is torn, fails or stands still; all calls in a journal
    power           what a power cut leaves, worked out from that journal
    disk            within a process, on any system: ENOSPC, EIO, EROFS, a slow disk; a clock that steps
    tamper          what is done to the files behind the cache's back
    evidence        what is on the disk, against what was promised
"""
