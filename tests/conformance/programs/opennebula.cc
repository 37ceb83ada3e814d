// Reads a VM template as OpenNebula does, checks its PCI devices and its topology with OpenNebula's
// functions, which are in taken.inc, and prints the template that comes of it as XML.

#include <array>
#include <iostream>
#include <sstream>

#include "NebulaUtil.h"
#include "Template.h"

struct HostShare
{
    enum PinPolicy { PP_NONE, PP_CORE, PP_THREAD, PP_SHARED };

    static PinPolicy str_to_pin_policy(std::string& pp_s);
};

struct HostSharePCI
{
    static int get_pci_value(const char* name, const VectorAttribute* pci, unsigned int& val);
};

// The default bus of a device, of oned.conf.
struct Nebula
{
    static Nebula& instance()
    {
        static Nebula one;
        return one;
    }

    void get_configuration_attribute(const std::string&, std::string& value) const { value = "0x01"; }
};

struct VirtualMachine
{
    static int parse_topology(Template* tmpl, std::string& error);
    static int check_pci_attributes(VectorAttribute* pci, std::string& error);
};

#include "taken.inc"

static int refused(const std::string& why)
{
    std::cerr << why << "\n";
    return 1;
}

int main(int, char** argv)
{
    Template read;
    char* syntax = nullptr;

    if (read.parse(argv[1], &syntax) != 0)
    {
        return refused(syntax ? syntax : "not parsed");
    }

    std::string error, xml;
    std::vector<VectorAttribute*> devices;
    read.get("PCI", devices);

    for (auto* device : devices)
    {
        if (VirtualMachine::check_pci_attributes(device, error) != 0)
        {
            return refused(error);
        }
    }

    if (VirtualMachine::parse_topology(&read, error) != 0)
    {
        return refused(error);
    }

    std::cout << read.to_xml(xml) << "\n";
    return 0;
}
