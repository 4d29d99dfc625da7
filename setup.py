"""What pyproject.toml cannot state: two data folders live beside the package and install inside it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["forge_dsl", "forge_dsl.*"]), "forge_dsl.templates", "forge_dsl.optimizers"],
    package_dir={"forge_dsl.templates": "templates", "forge_dsl.optimizers": "optimizers"},
)
