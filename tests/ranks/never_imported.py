"""A module whose import does not end."""

import threading

print("this import does not end", flush=True)  # noqa: T201
threading.Event().wait()
