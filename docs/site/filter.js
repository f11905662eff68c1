// A box over the table of ops: it shows the rows that have what is typed in them.
const table = location.pathname.endsWith("ops-table.html") && document.querySelector("article table");
if (table) {
  const box = document.createElement("input");
  const found = document.createElement("p");
  const rows = [...table.querySelectorAll("tbody tr")];
  const show = () => {
    const wanted = box.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    const left = rows.filter((row) => !row.hidden).length;
    found.textContent = left
      ? `${left} of ${rows.length} rows`
      : `No rule names ${wanted}: it follows its input, and runs in the dtype of its arguments.`;
  };
  for (const cell of table.querySelectorAll("tbody td:not(:first-child)")) {
    const [dtype] = cell.textContent.trim().split(" ");
    if (/^(float32|float16|bfloat16|raises)$/.test(dtype)) cell.classList.add("dtype", `dtype-${dtype}`);
  }
  Object.assign(box, { type: "search", placeholder: "type a part of a name, such as soft", className: "ops-filter" });
  box.setAttribute("aria-label", "Show the functions with this in their names");
  found.setAttribute("role", "status");
  box.addEventListener("input", show);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(box, found);
  box.value = new URLSearchParams(location.search).get("op") ?? "";
  show();
}

// The lab's frame is as high as the lab, so that the page alone scrolls.
const frame = document.querySelector("iframe.lab");
addEventListener("message", ({ source, data }) => {
  if (frame && source === frame.contentWindow && data.labHeight > 0) frame.style.height = `${data.labHeight}px`;
});
