"""The one typed configuration. Read next: settings.py, all of it; job_section.py, `[job]`.

Read by cli/ and by all code that needs the shared root or the platform's URL.
"""

from cray_agents.config.settings import HANDED, Config, load_config

__all__ = ["HANDED", "Config", "load_config"]
