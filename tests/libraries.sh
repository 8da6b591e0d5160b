# Sourced by setup scripts of environments that hold Mooncake, which links libibverbs, libcurl and libnuma, RDMA or not.

libraries=(libibverbs.so.1 libcurl.so.4 libnuma.so.1)
packages=(libibverbs1 libcurl4 libnuma1)

# find_libraries SYSROOT: adds what is unpacked there to the libraries' path.
find_libraries() {
    local folder
    for folder in "$1"/usr/lib/x86_64-linux-gnu "$1"/lib/x86_64-linux-gnu; do
        if [ -d "$folder" ]; then export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; fi
    done
}

# provide_libraries PYTHON SYSROOT: installs them, or without root unpacks their packages into SYSROOT. Says why and
# returns 1 where it cannot.
provide_libraries() {
    local python=$1 sysroot=$2 scratch package
    loads() { "$python" -c 'import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]' "${libraries[@]}" 2>/dev/null; }
    loads && return 0
    command -v apt-get >/dev/null || { echo "install rdma-core, libcurl and numactl: ${libraries[*]} are missing"; return 1; }
    if [ "$(id -u)" = 0 ]; then
        { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } >/dev/null 2>&1 || true
    fi
    loads && return 0
    (find_libraries "$sysroot" && loads) && return 0
    scratch=$(mktemp -d)
    if ! (cd "$scratch" && apt-get download "${packages[@]}" libnl-3-200 libnl-route-3-200) >/dev/null 2>&1; then
        rm -rf "$scratch"
        echo "apt-get can neither install nor fetch ${packages[*]}"
        return 1
    fi
    mkdir -p "$sysroot"
    for package in "$scratch"/*.deb; do dpkg -x "$package" "$sysroot"; done
    rm -rf "$scratch"
    (find_libraries "$sysroot" && loads) || { echo "${libraries[*]} do not load; install ${packages[*]}"; return 1; }
}
