function __homenode_complete
    set -l typed (commandline -opc) (commandline -ct)
    set -lx COMP_WORDS (string join \n -- $typed)
    set -lx COMP_CWORD (math (count $typed) - 1)
    _HOMENODE_COMPLETE=complete_fish homenode
end
complete --command homenode --arguments "(__homenode_complete)"
