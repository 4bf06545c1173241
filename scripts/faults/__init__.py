"""The fault campaign of docs/reliability.md: `inject` lets file operations fail, `__main__` disturbs commands."""
