"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  const first = Array.from(body.rows);
  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.order;
    if (text === undefined || text === "") return null;
    return cell.classList.contains("number") ? Number(text) : text;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = first.slice().sort((one, other) => {
        const a = key(one, column), b = key(other, column);
        if (a === null || b === null) return (a === null) - (b === null);
        return up ? compare(a, b) : compare(b, a);
      });
      body.append(...rows);
    });
  });
}
let opened = [];
addEventListener("beforeprint", () => {
  opened = Array.from(document.querySelectorAll("details:not([open])"));
  for (const one of opened) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of opened) one.open = false;
});
