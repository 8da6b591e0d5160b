"""What the operating system gives: facts of this machine, shared memory and its nodes, the process behind a socket."""
