#compdef homenode
_homenode_completion() {
    local -a found
    found=("${(@f)$(COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT - 1)) \
        _HOMENODE_COMPLETE=complete_zsh homenode)}")
    [[ -n $found ]] && _describe homenode found || _files
}
compdef _homenode_completion homenode
