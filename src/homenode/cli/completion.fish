function __homenode_complete
    set -l typed (commandline -opc) (commandline -ct)
    set -lx COMP_WORDS (string join \n -- $typed | string collect)
    set -lx COMP_CWORD (math (count $typed) - 1)
    set -l found (_HOMENODE_COMPLETE=complete_fish homenode)
    if set -q found[1]
        string join \n -- $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command homenode --no-files --arguments "(__homenode_complete)"
