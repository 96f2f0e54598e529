"""Print a long real text that every machine has: pages of Python's own language reference."""

from pydoc_data.topics import topics

PAGES = ("try", "with")


def main() -> None:
    print("\n\n".join(topics[page] for page in PAGES))


if __name__ == "__main__":
    main()
