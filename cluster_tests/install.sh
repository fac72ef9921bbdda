#!/usr/bin/env bash
# What the tests of real engines need, from Debian and PyPI. Without root, says what is missing; those tests say so too.
set -u
python=$1
packages=(iproute2 openssh-server openssh-client slurm-wlm slurm-wlm-torque munge)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
            || echo "apt-get failed; missing: ${missing[*]}"
    else
        echo "Missing (install them as root): apt-get install ${missing[*]}"
    fi
fi
"$python" -c 'import ray' 2>/dev/null || "$python" -m pip install --quiet 'ray>=2.52' || echo "Missing: pip install ray"
