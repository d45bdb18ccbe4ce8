"""Many runs: one after the other or on workers, with progress, and compared."""
