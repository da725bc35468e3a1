/* Everything that the script adds to the report. */
addDownloads();
document.querySelectorAll("figure[data-chart]").forEach(liveFigure);
const explorer = $("#explorer");
if (explorer) {
  const pictures = $("#explorer-pictures");
  unpack($("#explorer-columns").textContent)
    .then((data) => explore(explorer, data, pictures && JSON.parse(pictures.textContent)))
    .catch((error) => {
      explorer.append(h("p", {}, "The explorer could not be shown: this browser may be too old."));
      throw error;
    });
}
