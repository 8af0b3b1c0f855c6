"""What :mod:`harness.pytest_plugin` imports once a test asks for it."""
