# The part that a Django project already has: settings with a connection to DATABASE_URL. Then the program of the page, and a call of it.
import os
import sys
from urllib.parse import urlparse

import django
from django.conf import settings

url = urlparse(os.environ["DATABASE_URL"])
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.path[1:],
            "USER": url.username,
            "HOST": url.hostname,
            "PORT": url.port,
        }
    }
)
django.setup()
with open(sys.argv[1]) as program:
    exec(program.read())
place_order(30, 99.9)
