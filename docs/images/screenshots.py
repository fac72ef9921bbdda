"""Take the pictures of these docs anew: python docs/images/screenshots.py report.html RUNS_DIR (needs Chromium)."""

import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from chromium import Browser  # noqa: E402


def main(report: str, runs: str) -> None:
    call = [sys.executable, "-m", "rl_cluster_benchmark", "dashboard", runs, "--port", "0"]
    server = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    browser = Browser()
    try:
        browser.size(1100, 1500)
        browser.open(Path(report).resolve().as_uri())
        browser.screenshot(HERE / "report.png", full=False)
        browser.dark()
        browser.size(390, 844, phone=True, scale=2)
        browser.screenshot(HERE / "report_phone_dark.png", full=False)
        browser.dark(False)
        browser.size(1100, 1750)
        assert server.stdout is not None
        browser.open(re.search(r"http://\S+", server.stdout.readline())[0])
        time.sleep(5)  # two rounds of news
        browser.screenshot(HERE / "dashboard.png", full=False)
        assert not browser.errors, browser.errors
    finally:
        browser.close()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
