"""Make the environment of NVIDIA's client that measures a server under load, once, and print where its Python is.

    python3 build_scripts/aiperf_environment.py     # by hand; three minutes, 1.2 GB

aiperf wants versions of its own of much that the project uses, so that it is kept beside the environment of `make`. No
test runs it: profiles/serving_load.py does.
"""

from pathlib import Path

from environment import empty_environment, made_once, python_in, run

PACKAGE = "aiperf==0.13.0"


def main() -> None:
    print(python_in(made_once("aiperf", (Path(__file__),), build)))


def build(folder: Path) -> None:
    run(*empty_environment(folder), "install", PACKAGE)


if __name__ == "__main__":
    main()
