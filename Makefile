# hybrid-proxy: `make` alone prints this list.

VENV     := .venv
PYTHON   := $(VENV)/bin/python
OBJECTS  := dataplane/modes/ebpf/objects
SOURCES  := $(wildcard bpf/*.bpf.c)
HEADERS  := $(wildcard bpf/*.h)
ABI      := dataplane/modes/ebpf/maps/_abi.py
STATE    := $(shell cat $(sort $(SOURCES) $(HEADERS)) | sha256sum | cut -c 1-64)
BUILT    := $(patsubst bpf/%.bpf.c,$(OBJECTS)/%.bpf.o,$(SOURCES)) $(ABI) dataplane/kernel/_libbpf.py
APT      := iproute2 util-linux clang llvm clang-format bpftool libbpf-dev libbpf1 linux-libc-dev libc6-dev gcc make python3-venv python3-dev nftables iptables
APT_LAB  := shellcheck gpg gpg-agent tmux zsh fish vagrant systemd debian-archive-keyring libseccomp2 linux-libc-dev-arm64-cross
APT_COMPARE := wrk iperf3 chromium fonts-dejavu-core
APT_TRACE := python3-bpfcc
APT_ACROSS := gcc-aarch64-linux-gnu libc6-dev-arm64-cross
APT_VM   := qemu-system-x86 qemu-system-arm $(APT_ACROSS) busybox-static kmod debian-archive-keyring
LOCK     := $(VENV)/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
STAMPS   := $(VENV)/.stamps
EXTRAS   := workshop,auth-provider
TOOLS    := build/tools/usr/sbin
PROMTOOL := build/tools/usr/bin/promtool
IPVS      = $(wildcard /proc/net/ip_vs)$(shell modprobe -nq ip_vs 2>/dev/null && echo loadable)

# Folders of tests that run in their own process; those that need root, processes or the kernel are in `live` folders.
QUICK    := tests/balancing tests/controller tests/docs tests/fakes tests/modes tests/semantics tests/workshop
WORKERS  ?= 5
CLANG    ?= clang
INCLUDES := -I/usr/include/$(shell uname -m)-linux-gnu
CFLAGS_BPF := -O2 -g -target bpf -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare $(INCLUDES) '-ffile-prefix-map=$(CURDIR)=.'

# A step of the installation is one line. What its command prints is shown if it fails; V=1 shows all of it.
# $(call step,words,command)
ifeq ($(V),1)
Q :=
step = echo "$(1)"; $(2)
else
Q := @
step = echo "$(1)"; log=$$(mktemp); ( $(2) ) >$$log 2>&1 || { code=$$?; cat $$log >&2; rm $$log; exit $$code; }; rm $$log
endif

.PHONY: help demo test test-quick test-long test-kernels check check-fast bench compare compare-vm setup vm bpf docs pictures release lock format clean
.DEFAULT_GOAL := help

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMPS)/agent bpf ## show the main job on this machine, in namespaces of its own (root; under a minute)
	$(Q)$(VENV)/bin/hybrid-proxy lab demo

# Most tests wait rather than compute: there are more workers than processors. Without IPVS in this kernel, its tests
# run in a virtual machine, beside the others. Most agents and commands are forked from a process that has imported them
# (tests/nursery.py); the others begin from bytecode, the guest's too.
test test-quick test-long: export PYTHONDONTWRITEBYTECODE =
test: setup $(if $(IPVS),,$(STAMPS)/vm) ## run the tests, about a quarter of an hour on two processors (root: they make namespaces of their own); WORKERS=5
	$(Q)$(PYTHON) -m compileall -q controller dataplane workshop
	$(Q)$(PYTHON) -m pytest -n $(WORKERS) -m "not long" --durations=20 --costs=20 $(ARGS)

test-quick: setup ## run the tests that touch nothing outside their own process, 75 seconds of CPU (no root)
	$(Q)$(PYTHON) -m pytest -n 2 --kernel none -m "not long" --ignore-glob='*/live' $(QUICK) $(ARGS)

test-long: setup $(if $(IPVS),,$(STAMPS)/vm) ## run the tests that only take long, and all examples of properties, before a release
	$(Q)$(PYTHON) -m compileall -q controller dataplane workshop
	$(Q)HYBRID_PROXY_EXAMPLES=all $(PYTHON) -m pytest -n $(WORKERS) -m "long or property" --durations=20 --costs=20 $(ARGS)

test-kernels: vm ## the conformance suite of every mode on Debian's kernels: KERNELS="5.10 6.1" MODES="ebpf" CORE=1
	$(Q)$(PYTHON) -m tests.vm matrix $(if $(KERNELS),--kernels $(KERNELS)) $(if $(MODES),--modes $(MODES)) $(if $(CORE),--core)

check: setup ## formatters, linters, types and the import contracts
	$(Q)$(VENV)/bin/ruff format --check .
	$(Q)$(VENV)/bin/ruff check .
	$(Q)$(VENV)/bin/mypy
	$(Q)$(VENV)/bin/lint-imports --no-cache
	$(Q)clang-format --dry-run --Werror $(SOURCES) $(HEADERS)

# $(call changed,pattern,command): the command, with the files of this kind that differ from the last commit, if there are any.
changed = files=$$({ git diff --name-only --diff-filter=d HEAD; git ls-files -o --exclude-standard; } | grep '$(1)'); test -z "$$files" || { $(2); }
check-fast: ## the same, but ruff and clang-format only for files that differ from the last commit, and the commits' subjects: seconds
	$(Q)$(call changed,\.py$$,{ $(VENV)/bin/ruff format --check $$files || { echo "make format: reformats them" >&2; false; }; } && $(VENV)/bin/ruff check $$files)
	$(Q)$(call changed,^bpf/.*\.[ch]$$,clang-format --dry-run --Werror $$files || { echo "make format: reformats them" >&2; false; })
	$(Q)$(VENV)/bin/mypy
	$(Q)$(VENV)/bin/lint-imports --no-cache
	$(Q)$(PYTHON) -m pytest -q -n 0 --kernel none tests/docs/test_subjects.py

# An agent starts from bytecode, as where it is installed.
bench: export PYTHONDONTWRITEBYTECODE =
bench: setup ## run the benchmarks, or one: make bench BENCH=packet_kinds
	$(Q)$(PYTHON) -m compileall -q controller dataplane workshop
	$(Q)$(PYTHON) -m hybrid_proxy.workshop.benchmarks $(BENCH)

compare: setup ## compare the modes on this machine, half an hour: ARGS="--services 10,1000"; build/compare/report.html
	$(Q)$(VENV)/bin/hybrid-proxy compare --report build/compare/report.html $(ARGS)

# Ratios only: the processor may be emulated. What is finished stays in build/compare-vm; the same command goes on.
compare-vm: vm ## the same, with mode ipvs too, in a virtual machine; under an hour: build/compare-vm/report.html
	$(Q)mkdir -p build/compare-vm
	$(Q)$(PYTHON) -m tests.vm run 6.1 --memory 3072 --timeout 7200 --share build/compare-vm -- \
		env PATH="/usr/sbin:/usr/bin:/sbin:/bin" $(VENV)/bin/python -m hybrid_proxy.controller compare \
		--services 100 --changes 3 --state $(CURDIR)/build/compare-vm/state $(ARGS)
	$(Q)$(VENV)/bin/hybrid-proxy compare --from build/compare-vm/state --report build/compare-vm/report.html

setup: $(STAMPS)/apt $(STAMPS)/venv bpf $(STAMPS)/lab $(STAMPS)/trace ## install what is missing, in two to six minutes: packages, the virtual environment, BPF objects

vm: setup $(STAMPS)/vm ## install what tests on other kernels need (QEMU)

bpf: $(BUILT) ## compile the BPF programs (clang)

docs: setup ## write what is generated from definitions: docs/configuration.md, its JSON schema, that of the chart, docs/output.md, docs/hybrid-proxy.8, the tree in docs/architecture.md
	$(Q)$(PYTHON) -m hybrid_proxy.workshop.pages

pictures: setup ## make the pictures of the demo, of `top` and of a report anew, on a machine with nothing else to do (root)
	$(Q)$(PYTHON) -m hybrid_proxy.workshop.lab.recording docs/demo.svg
	$(Q)$(PYTHON) -m tests.workshop.top.screenshot docs/top.svg
	$(Q)$(VENV)/bin/hybrid-proxy compare --fresh --report build/compare-sample/report.html \
		--modes ebpf,nftables,iptables --services 1000 --rounds 6 --changes 3
	$(Q)$(PYTHON) -m tests.workshop.compare.screenshot build/compare-sample/report.html docs/compare.png

# From the last commit, in a folder of its own: nothing that is not committed, and no umask, gets in. setuptools gives the
# source distribution the times of the build. Both wheels are built from it; only a C file's object differs. It needs a
# symbol of glibc 2.2.5 (aarch64: 2.17), nothing of musl; libbpf is opened when an agent starts.
SAME_TAR  = tar c --format=gnu --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@$$SOURCE_DATE_EPOCH
release: setup ## build what is released from the last commit: dist/RELEASE.md tells; BASE=debian@sha256:... is the image's base
	$(call packages,$(APT_ACROSS))
	$(Q)test -z "$(BASE)" || expr "$(BASE)" : '.*@sha256:[0-9a-f]\{64\}$$' >/dev/null || { echo "BASE is not NAME@sha256:DIGEST" >&2; exit 1; }
	$(Q)rm -rf dist build/release && mkdir -p dist build/release
	$(Q)umask 022 && export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PYTHONHASHSEED=0 && git archive HEAD | tar x -C build/release && \
		commit=$$(git rev-parse HEAD) tags=$$(git tag --points-at HEAD) && \
		(cd build/release && $(abspath $(PYTHON)) -m hybrid_proxy.workshop.release stamp $$commit $$tags) && \
		$(call step,build    the source distribution,$(abspath $(PYTHON)) -m build --no-isolation --sdist build/release)
	$(Q)umask 022 && export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PYTHONHASHSEED=0 && cd build/release/dist && \
		tar xf *.tar.gz && rm *.tar.gz && for tree in */; do \
		$(SAME_TAR) $${tree%/} | gzip -9n > $${tree%/}.tar.gz; \
		for machine in x86_64 aarch64; do $(call step,build    the wheel for $$machine,CC=$$machine-linux-gnu-gcc $(abspath $(PYTHON)) -m build \
		--no-isolation --wheel --outdir . -C--build-option=--plat-name=manylinux_2_17_$$machine $$tree) && rm -r $$tree/build || exit 1; done; rm -r $$tree; done
	$(Q)umask 022 && export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) && cd build/release/deploy/helm && \
		$(SAME_TAR) hybrid-proxy | gzip -9n > ../../dist/hybrid-proxy-$$(sed -n 's/^version: //p' hybrid-proxy/Chart.yaml).tgz
	$(Q)umask 022 && cp build/release/dist/* $(addprefix build/release/deploy/image/,requirements.txt workshop.txt) dist && \
		sed -e "s|\(image\.revision=\).*|\1\"$$(git rev-parse HEAD)\"|" $(if $(BASE),-e 's|^ARG BASE=.*|ARG BASE=$(BASE)|') build/release/deploy/image/Dockerfile > dist/Dockerfile
	$(Q)umask 022 && cd build/release && $(abspath $(PYTHON)) -m hybrid_proxy.workshop.release ../../dist $$(git rev-parse HEAD) "$(BASE)"
	$(Q)cat dist/SHA256SUMS

# The versions of all Python packages of the image, with the hashes of their wheels for every architecture.
lock: setup ## pin what the image installs anew: deploy/image/*.txt
	$(Q)$(LOCK) pyproject.toml -o deploy/image/requirements.txt
	$(Q)$(LOCK) pyproject.toml --extra workshop -c deploy/image/requirements.txt -o deploy/image/workshop.txt \
		$$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' deploy/image/requirements.txt)
	$(Q)$(LOCK) --group build -o deploy/image/build.txt
	$(Q)for machine in x86_64 aarch64; do $(VENV)/bin/uv pip install -q --dry-run --target build/locked --python-platform $$machine-manylinux_2_28 \
		--only-binary :all: --require-hashes $(addprefix -r deploy/image/,requirements.txt workshop.txt build.txt) || exit 1; done

format: setup ## format Python and C in place
	$(Q)$(VENV)/bin/ruff format .
	$(Q)$(VENV)/bin/ruff check --fix .
	$(Q)clang-format -i $(SOURCES) $(HEADERS)

clean: ## remove everything that was built
	rm -rf $(VENV) $(OBJECTS) build dist *.egg-info dataplane/kernel/_publish*.so dataplane/kernel/_publish.c \
		dataplane/kernel/_libbpf.py $(ABI)

# Built files that were copied may be newer than sources of another state, so contents decide as well.
OTHER    := $(if $(shell grep -s $(STATE) $(ABI)),,other)
.PHONY: other

$(OBJECTS)/%.bpf.o: bpf/%.bpf.c $(HEADERS) $(OTHER)
	@mkdir -p $(OBJECTS)
	@echo "bpf      $<"
	$(Q)$(CLANG) $(CFLAGS_BPF) -c $< -o $@

$(OBJECTS)/abi.h: bpf/abi.h $(OTHER)
	@mkdir -p $(OBJECTS)
	$(Q)$(CLANG) -E -P -DABI_FOR_PYTHON -x c $< -o $@

# PYTHON has cffi: that of the virtual environment, or the one that builds the package (setup.py).
$(ABI): dataplane/modes/ebpf/maps/abi_build.py $(OBJECTS)/abi.h $(SOURCES) $(HEADERS)
	$(Q)$(PYTHON) -P $(wordlist 1,2,$^) $@ $(STATE)

dataplane/kernel/_libbpf.py: dataplane/kernel/libbpf_build.py
	$(Q)$(PYTHON) -P $< $@
	@touch $@

# Programs that only benchmarks use: they ask for these files themselves.
build/%.bpf.o: %.bpf.c $(HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CLANG) $(CFLAGS_BPF) -c $< -o $@

build/%: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) -O2 -Wall -Wextra -Werror $< -o $@

# $(call packages,names): Debian packages, only when one is missing, and then only those.
define packages
	@missing=$$(for p in $(1); do dpkg -s $$p >/dev/null 2>&1 || printf '%s ' $$p; done); \
	if [ -n "$$missing" ]; then \
		$(call step,apt      $$missing (about a minute),apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $$missing); \
	fi
endef

# Virtual machines, for tests on other kernels. Kernels are downloaded when they are needed.
$(STAMPS)/vm: Makefile $(STAMPS)/apt
	$(call packages,$(APT_VM))
	@touch $@

# What answers in `compare`, what nodes are reached by, and what reads alerts: unpacked, because the installed packages would start servers here.
$(TOOLS)/nginx:
	@$(call step,apt      nginx (unpacked to build/tools),mkdir -p build/tools && cd build/tools && apt-get download -q nginx && dpkg -x nginx_*.deb . && rm nginx_*.deb)
	@touch $@

# Never started outside of a test's namespaces.
$(TOOLS)/sshd:
	@$(call step,apt      openssh-server (unpacked to build/tools),mkdir -p build/tools && cd build/tools && apt-get download -q openssh-server libwrap0 && for deb in openssh-server_*.deb libwrap0_*.deb; do dpkg -x $$deb . && rm $$deb; done)
	@touch $@

$(PROMTOOL):
	@$(call step,apt      promtool (unpacked to build/tools),mkdir -p build/tools && cd build/tools && apt-get download -q prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
	@touch $@

# What checks deploy/, vagrant/ and the screen of `top`, and compares modes. Without these the tests that need them are skipped, and say so.
$(STAMPS)/lab: Makefile tests/deploy/kubectl.py tests/deploy/helm.py $(TOOLS)/nginx $(TOOLS)/sshd $(PROMTOOL) $(STAMPS)/apt $(STAMPS)/venv
	$(call packages,$(APT_LAB) $(APT_COMPARE))
	-@$(call step,kubectl  for the tests of deploy/,$(PYTHON) -m tests.deploy.kubectl)
	-@$(call step,helm     for the tests of deploy/,$(PYTHON) -m tests.deploy.helm)
	@touch $@

# What `hybrid-proxy trace` measures with. Without it the tests of that are skipped, and say so. Debian splits the headers
# of a kernel into two packages, and bcc takes one folder: those of Debian's own kernel are merged, and fit every kernel.
$(STAMPS)/trace: Makefile $(STAMPS)/apt
	-$(call packages,$(APT_TRACE))
	-@$(call step,headers  for the tests of trace (unpacked to build/tools),mkdir -p build/tools && cd build/tools && \
		special=$$(apt-cache depends linux-headers-$$(dpkg --print-architecture) | awk '/Depends: linux-headers/ {print $$2}') && \
		common=$$(apt-cache depends $$special | awk '/Depends: linux-headers.*common/ {print $$2}') && \
		apt-get download -q -o APT::Sandbox::User=root $$common $$special && \
		for package in $$common $$special; do dpkg -x $${package}_*.deb headers && rm $${package}_*.deb; done && \
		rm -f headers/usr/src/$$special/scripts headers/usr/src/$$special/tools && rm -rf kernel-headers && \
		cp -a headers/usr/src/$$common kernel-headers && cp -a headers/usr/src/$$special/. kernel-headers && rm -r headers)
	@touch $@

$(STAMPS)/apt: Makefile
	$(call packages,$(APT))
	@mkdir -p $(VENV)
	@test -x $(PYTHON) || { echo "venv     $(VENV)"; python3 -m venv $(VENV); }
	@mkdir -p $(STAMPS) && touch $@

# What runs an agent and the lab; then what tests, benchmarks and compares them.
$(STAMPS)/agent: pyproject.toml setup.py $(wildcard dataplane/kernel/*_build.py) $(STAMPS)/apt
	@$(call step,pip      hybrid-proxy,$(PYTHON) -m pip install --editable '.[workshop]')
	@touch $@

$(STAMPS)/venv: $(STAMPS)/agent
	@$(call step,pip      the development tools (about a minute),$(PYTHON) -m pip install --upgrade 'pip>=25.1' && $(PYTHON) -m pip install --group dev --editable '.[$(EXTRAS)]')
	@touch $@
