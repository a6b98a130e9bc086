"""The soak: a server's work, replayed from a trace, on a directory that everything bad happens to.

`python -m tools.soak --minutes 5` runs it. A judge (`judge`, `truth`) starts the server (`server`) in a child process,
again and again, does to it and to its files what `schedule` says (`tamper`, `disk`), and keeps its own account of what
must be there and of what a right answer is. With `--remote` there are several machines (`fleet`) and an engine that they
share (`engines`); each has a judge of its own.
"""
