# The part that a project with Alembic already has: an env.py with a connection to DATABASE_URL. run_alembic.py MIGRATION DIRECTORY
# upgrade|downgrade: writes both files below the directory and runs the migration.
import shutil
import sys
from pathlib import Path

from alembic import command
from alembic.config import Config

ENV = """
import os

from alembic import context
from sqlalchemy import create_engine

url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
with create_engine(url).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
migration, directory, action = sys.argv[1:]
versions = Path(directory) / "versions"
versions.mkdir(exist_ok=True)
(Path(directory) / "env.py").write_text(ENV)
shutil.copy(migration, versions / "0007_capture_shipments.py")
config = Config()
config.set_main_option("script_location", directory)
command.upgrade(config, "head") if action == "upgrade" else command.downgrade(config, "base")
