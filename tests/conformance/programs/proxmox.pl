#!/usr/bin/perl
# Proxmox's own parser, and config_to_command, without a Proxmox: what the machine would say is given.
# Standard input: a JSON list of {"conf": TEXT, "devices": [BDF...]}. Standard output, for each, a
# line: {"words": [...], "timeout": SECONDS}, or {"error": TEXT}; warnings count as errors.
# HOMENODE_PVE: a directory with checkouts of qemu-server, pve-common, pve-guest-common, pve-storage,
# pve-access-control. Modules of other parts of Proxmox, and any that is absent, are empty here.
use v5.36;
use JSON;

my $VMID = 101;
my $sources = $ENV{HOMENODE_PVE};

sub empty_module ($, $file) {
    return if $file !~ /^[A-Z]/;
    my $package = $file =~ s/\.pm$//r =~ s!/!::!gr;
    my $text = "package $package; our \$AUTOLOAD;"
        . 'sub import ($p, @names) { no strict "refs"; my $to = caller;'
        . ' for my $name (@names) { next if $name !~ /^[a-z_]\w*$/i; *{"${to}::$name"} = sub { } } }'
        . ' sub new { return bless {}, shift } sub AUTOLOAD { return } 1;';
    open(my $handle, '<', \("use v5.36; $text"));
    return $handle;
}
my $elsewhere =
    qr!^PVE/(IPCC|Cluster|AccessControl|RPCEnvironment|RS/.*|Network/SDN.*|Firewall.*|HA/.*)\.pm$!;
unshift @INC, sub ($self, $file) { return $file =~ $elsewhere ? empty_module($self, $file) : () };
push @INC, map { "$sources/$_/src" }
    qw(qemu-server pve-common pve-guest-common pve-storage pve-access-control);
push @INC, \&empty_module;

# Read once, as the module is loaded.
require PVE::ProcFSTools;
my $cpus = sub { return { cpus => 4096, vendor => 'GenuineIntel', flags => '' } };
{ no warnings; *PVE::ProcFSTools::read_cpuinfo = $cpus; }
require PVE::QemuServer;
require PVE::QemuServer::CPUConfig;
require PVE::QemuServer::Helpers;

my @devices;
my $version = '10.1';
my %said = (    # by the name of the function, in whichever package it is
    kvm_version => sub { return $version },
    kvm_user_version => sub { return $version },
    get_host_arch => sub { return 'x86_64' },
    get_host_phys_address_bits => sub { return 46 },
    kernel_has_vhost_net => sub { return 1 },
    hugepages_chunk_size_supported => sub { return 1 },
    host_numanode_exists => sub { return 1 },
    nodename => sub { return 'localhost' },
    next_vnc_port => sub { return 5900 },
    load_custom_cpu_model_config => sub { return { ids => {} } },
    get_hw_capabilities => sub { return { 'amd-sev' => {} } },
    lspci => sub ($filter = undef, @) {
        return [
            map { { id => $_ } } grep {
                !defined($filter)
                    || (ref($filter) eq 'CODE' ? $filter->({ id => $_ }) : m/^(0000:)?\Q$filter\E/)
            } @devices
        ];
    },
    pci_device_info => sub { return { vendor => '0x10de', device => '0x2330', iommugroup => 1 } },
);
for my $file (grep { m!^PVE/! } keys %INC) {
    my $package = $file =~ s/\.pm$//r =~ s!/!::!gr;
    no strict 'refs';
    no warnings;
    for my $name (keys %said) {
        *{"${package}::$name"} = $said{$name} if defined &{"${package}::$name"};
    }
}
PVE::QemuServer::CPUConfig::initialize_cpu_models();

local $SIG{__WARN__} = sub ($text) { die $text };
for my $case (decode_json(join '', <STDIN>)->@*) {
    @devices = sort $case->{devices}->@*;
    my $answer = eval {
        my $conf = PVE::QemuServer::parse_vm_config("/qemu-server/$VMID.conf", $case->{conf}, 1);
        my $memory = PVE::QemuServer::Memory::get_current_memory($conf->{memory});
        my $timeout = PVE::QemuServer::Helpers::config_aware_timeout($conf, $memory);
        # Disks and networks are of the storage and the bridges, which are not here.
        delete $conf->{$_} for grep { /^(scsi|virtio|sata|ide|net|efidisk|tpmstate)\d+$/ } keys %$conf;
        delete $conf->{boot};
        my $defaults = PVE::QemuServer::load_defaults();
        my $words =
            PVE::QemuServer::config_to_command({ ids => {} }, $VMID, $conf, $defaults,
                { 'dry-run' => 1 });
        { words => $words, timeout => $timeout };
    } // { error => "$@" };
    say encode_json($answer);
}
